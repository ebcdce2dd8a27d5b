"""Estimates compared with training: the smallest budget, and the largest batch for a budget.

For each of five programs, `swapkit.estimate` predicts both from two recorded batch sizes. Then
sessions with the policy `"auto"` train, each in a process of its own:

1. The smallest budget: by bisection, the smallest at which all steps fit, within 0.3 %. Goal: the
   estimate is at most 3 % away.
2. The largest batch for the memory that plain training takes with the larger recorded size: batches
   of one sample more or less, until one fits and the next does not. Goal: the estimate is right, or
   one sample less.

`--json FILE` writes one flat object of all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._estimate_programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARKS = Path(__file__).resolve().parent
MIB = 1 << 20
GOAL = 0.03
BRACKET = 0.04  # around the estimate, for a start
TOLERANCE = 0.003  # of the measured budget
BUDGET = "100%"  # of plain training, for the largest batch
STEPS = 8

Figures = dict[str, Any]


def run(*arguments: object) -> Figures:
    """Run `_estimate_training.py` in its own process; return the JSON that it prints."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    environment |= {"PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, str(BENCHMARKS / "_estimate_training.py"), *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    figures: Figures = json.loads(done.stdout)
    return figures


def fits(name: str, batch: int, budget_bytes: int) -> bool:
    return bool(run("train", name, batch, budget_bytes, STEPS)["fits"])


def find_smallest(name: str, batch: int, guess_bytes: int) -> int:
    """Return the smallest budget that fits, starting from a guess."""
    low, high = int(guess_bytes * (1 - BRACKET)), int(guess_bytes * (1 + BRACKET))
    while fits(name, batch, low):
        low, high = int(low * (1 - 2 * BRACKET)), low
    while not fits(name, batch, high):
        low, high = high, int(high * (1 + 2 * BRACKET))
    while high - low > TOLERANCE * high:
        middle = (low + high) // 2
        if fits(name, batch, middle):
            high = middle
        else:
            low = middle
    return high


def find_largest(name: str, budget_bytes: int, guess: int) -> int:
    """Return the largest batch that fits, starting from a guess."""
    size = guess
    while size and not fits(name, size, budget_bytes):
        size -= 1
    while size >= guess and fits(name, size + 1, budget_bytes):
        size += 1
    return size


def measure(name: str) -> Figures:
    program = PROGRAMS[name]
    found = run("estimate", name, BUDGET)
    print(f"== {name}\n{found['table']}\n", flush=True)
    smallest = find_smallest(name, program.batch, found["smallest_budget_bytes"])
    budget_bytes, guess = found["budgets_0"], found["largest_batches_0_batch_size"]
    return {
        "batch": program.batch,
        "plain_bytes": found["plain_bytes"],
        "estimate_seconds": found["seconds"],
        "smallest_estimated_bytes": found["smallest_budget_bytes"],
        "smallest_measured_bytes": smallest,
        "smallest_error": found["smallest_budget_bytes"] / smallest - 1,
        "largest_estimated": guess,
        "largest_measured": find_largest(name, budget_bytes, guess),
    }


def list_misses(name: str, found: Figures) -> list[str]:
    misses = []
    if abs(found["smallest_error"]) > GOAL:
        misses.append(f"{name}: smallest budget {found['smallest_error']:+.1%}")
    if found["largest_measured"] - found["largest_estimated"] not in {0, 1}:
        misses.append(f"{name}: largest batch")
    return misses


def print_table(results: dict[str, Figures]) -> None:
    print(f"{'':14}{'':8}{'plain':>9}{'smallest budget, MiB':>28}{'':9}{'largest batch':>22}")
    heads = ("batch", "MiB", "estimated", "measured", "error", "estimated", "measured")
    widths = (8, 9, 15, 13, 9, 12, 10)
    print(f"{'program':14}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    for name, found in results.items():
        cells = (
            str(found["batch"]),
            f"{found['plain_bytes'] / MIB:.1f}",
            f"{found['smallest_estimated_bytes'] / MIB:.2f}",
            f"{found['smallest_measured_bytes'] / MIB:.2f}",
            f"{found['smallest_error']:+.1%}",
            str(found["largest_estimated"]),
            str(found["largest_measured"]),
        )
        print(f"{name:14}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="run these programs")
    options = parser.parse_args(arguments)
    results = {name: measure(name) for name in options.only or PROGRAMS}
    print_table(results)
    misses = [miss for name, found in results.items() for miss in list_misses(name, found)]
    print("\nGoals (smallest budget within 3 %, largest batch right or one less): ", end="")
    print("missed: " + "; ".join(misses) if misses else "reached")
    if options.json is not None:
        flat = {f"{name}_{key}": each for name in results for key, each in results[name].items()}
        options.json.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
