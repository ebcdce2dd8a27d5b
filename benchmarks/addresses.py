"""Memory of training with planned addresses, without them, and on torch's own allocator.

Four programs, on one compute thread: the demo's; accumulation as in 1F1B with another length for
each microbatch; the same with one allocation more and one less in each phase, elsewhere in each
step; and a model of experts, whose routing differs in each step. Each is trained in a session with
2, 0.8 and 0.6 times the memory that it takes without a budget: as sessions do it ("planned"), and
without planned addresses ("unplanned", as on a device without virtual memory); and on torch's own
allocator, glibc. Each way has its own process; all take turns, step by step.

- `ratio`: peak of the reserved memory over the peak of the requested bytes, both of the measured
  steps: the last ones in which the way's session was stable and, if planned, had a layout. For
  glibc: the growth of the process's peak of resident memory, as the kernel reports it, over the
  requested bytes of the same program without a budget.
- `hit_share`: of the bytes requested in those steps, those served in the memory of the layout: at
  their planned addresses, or in holes where no other request is planned meanwhile.
- `maps`: granules mapped in a step, the most.
- `skipped`: steps among the measured ones that do not count: the session planned anew, as one does
  whose steps deviate for long (experts). Late: too few steps to measure were stable, or had a
  layout; the figures are then those of the last steps.
- `time_ratio`: seconds of a step over those of the unplanned way in the same turn, the median;
  without the time in which the thread was runnable but no processor was free.

All ways must end with the same parameters and optimizer states, bit by bit.

`--json FILE` writes one flat object: `demo_planned_200_ratio`, `demo_planned_200_requested_bytes`,
`demo_planned_200_peak_bytes`, ... (programs: demo, lengths, disturbed, experts; ways: planned,
unplanned; budgets: 200, 80, 60 per cent), `demo_glibc_ratio`, ..., `same_bits`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARKS = Path(__file__).resolve().parent
MIB = 1 << 20
PROGRAMS = ("demo", "lengths", "disturbed", "experts")
PERCENTS = (200, 80, 60)
PLANNED, UNPLANNED, GLIBC, POOL = "planned", "unplanned", "glibc", "pool"
# Figures of which the largest of the measured steps counts.
MOST = {PLANNED: ("maps", "layout_bytes"), UNPLANNED: ("maps",), GLIBC: ()}
SETTLING = 4  # steps: the first ones as planned still map, and give back what lay elsewhere
GOAL_RATIO, GOAL_TIME = 1.02, 1.0
GOAL_HITS = {"demo": 0.99, "lengths": 0.99, "disturbed": 0.99, "experts": 0.95}

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The extent of the measurement."""

    extent: str  # size of the programs
    percents: tuple[int, ...]
    most_steps: int  # until sessions are stable, and their steps lie as planned; and again, to skip
    steps: int  # measured after those


FULL = Effort(extent="full", percents=PERCENTS, most_steps=80, steps=12)
QUICK = Effort(extent="quick", percents=(80,), most_steps=40, steps=5)


class Trainer:
    """A process that trains one program in one way."""

    def __init__(self, program: str, effort: Effort, way: str, limit_bytes: int = 0) -> None:
        """Start the process; it trains a step at each command."""
        arguments = [program, effort.extent, way, *([str(limit_bytes)] if limit_bytes else [])]
        self._process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / "_address_training.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},
        )
        self.way = way
        self.steps: list[Figures] = []

    def step(self) -> None:
        """Train one step and store its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.steps.append(self._read())

    def close(self) -> str:
        """End the process; return the digest of what it trained."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        digest: str = self._read()["digest"]
        self._process.wait()
        return digest

    def kill(self) -> None:
        """End the process, in whatever state."""
        self._process.kill()
        self._process.wait()

    def settled_turns(self) -> list[int]:
        """Return the places of the steps that were stable and, if planned, had a layout."""
        return [
            turn
            for turn, step in enumerate(self.steps)
            if step.get("stage", "stable") == "stable"
            and (self.way != PLANNED or "hit_bytes" in step)
        ]

    def measured_turns(self, count: int) -> tuple[Sequence[int], bool]:
        """Return the last settled turns and True; the last turns and False if those are too few."""
        settled = self.settled_turns()[-count:]
        is_enough = len(settled) == count
        return (settled if is_enough else range(len(self.steps))[-count:]), is_enough

    def _read(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a training process ended with status {self._process.wait()}")
        figures: Figures = json.loads(line)
        return figures


def measure_plain(program: str, effort: Effort) -> int:
    """Return the most requested bytes of a program without a budget."""
    trainer = Trainer(program, effort, POOL)
    try:
        for _ in range(4):
            trainer.step()
    finally:
        trainer.kill()
    requested: int = max(each["requested_bytes"] for each in trainer.steps)
    return requested


def measure(program: str, effort: Effort) -> Figures:
    """Train a program in all ways, in turns; return the figures."""
    plain_bytes = measure_plain(program, effort)
    trainers = {GLIBC: Trainer(program, effort, GLIBC)}
    for percent in effort.percents:
        for way in (UNPLANNED, PLANNED):
            limit_bytes = plain_bytes * percent // 100
            trainers[f"{way}_{percent}"] = Trainer(program, effort, way, limit_bytes)
    try:
        train(list(trainers.values()), effort)
        digests = {each.close() for each in trainers.values()}
    finally:
        for trainer in trainers.values():
            trainer.kill()
    figures: Figures = {f"{program}_same_bits": len(digests) == 1}
    glibc = summarize(trainers[GLIBC], trainers[GLIBC], effort, plain_bytes)
    figures |= {f"{program}_{GLIBC}_{key}": value for key, value in glibc.items()}
    for name, trainer in trainers.items():
        if name != GLIBC:
            base = trainers[f"{UNPLANNED}_{name.rpartition('_')[2]}"]
            found = summarize(trainer, base, effort)
            figures |= {f"{program}_{name}_{key}": value for key, value in found.items()}
    return figures


def train(trainers: Sequence[Trainer], effort: Effort) -> None:
    """Train until each has been settled for as many steps as are measured, after some more."""
    for _ in range(effort.most_steps + effort.steps):
        run_turn(trainers)
        if all(len(each.settled_turns()) >= SETTLING + effort.steps for each in trainers):
            break


def run_turn(trainers: Sequence[Trainer]) -> None:
    """Train a step in each way, every other time in reverse order."""
    is_even = len(trainers[0].steps) % 2 == 0
    for trainer in trainers if is_even else reversed(trainers):
        trainer.step()


def summarize(
    trainer: Trainer, base: Trainer, effort: Effort, requested_bytes: int | None = None
) -> Figures:
    """Return the figures of the last settled steps of one way, in time beside those of another.

    Args:
        trainer: that was measured.
        base: the way to compare its time with.
        effort: how many steps count.
        requested_bytes: of a program on glibc.
    """
    turns, is_settled = trainer.measured_turns(effort.steps)
    steps = [trainer.steps[turn] for turn in turns]
    peak_bytes = max(each["peak_bytes"] for each in steps)
    requested_bytes = requested_bytes or max(each["requested_bytes"] for each in steps)
    ratios = [trainer.steps[turn]["seconds"] / base.steps[turn]["seconds"] for turn in turns]
    figures: Figures = {
        "requested_bytes": requested_bytes,
        "peak_bytes": peak_bytes,
        "ratio": peak_bytes / requested_bytes,
        "seconds": statistics.median(each["seconds"] for each in steps),
        "time_ratio": statistics.median(ratios),
        "steps": len(trainer.steps),
        "skipped": turns[-1] - turns[0] + 1 - len(turns),
        "is_settled": is_settled,
    }
    if trainer.way == PLANNED:
        figures["hit_share"] = is_settled * share_hits(steps)
    most = {name: max(each[name] for each in steps) for name in MOST[trainer.way]}
    return figures | most


def share_hits(steps: Sequence[Figures]) -> float:
    """Return the share of the bytes requested in steps that lie in the memory of a layout."""
    served_bytes = sum(each.get("served_bytes", 0) for each in steps)
    hit_bytes = sum(each.get("hit_bytes", 0) for each in steps)
    return hit_bytes / served_bytes if served_bytes else 0.0


# ---- tables --------------------------------------------------------------------------------------


def print_heading() -> None:
    print(
        f"{'program':<10} {'budget':>6} {'way':<10}{'requested':>11}{'reserved':>11}{'ratio':>8}"
        f"{'hits':>9}{'maps':>7}{'ms':>8}{'/ unplanned':>13}{'steps':>7}{'skipped':>9}"
    )


def print_rows(program: str, figures: Figures, percents: Sequence[int]) -> None:
    names = [f"{way}_{percent}" for percent in percents for way in (PLANNED, UNPLANNED)]
    for name in (*names, GLIBC):
        way, _, percent = name.partition("_")
        mine = {
            key.removeprefix(f"{program}_{name}_"): value
            for key, value in figures.items()
            if key.startswith(f"{program}_{name}_")
        }
        hits = f"{mine['hit_share']:9.2%}" if "hit_share" in mine else f"{'-':>9}"
        maps = f"{mine['maps']:7}" if "maps" in mine else f"{'-':>7}"
        share = f"{int(percent) / 100:.1f}" if percent else "-"
        ratio = "-" if way == GLIBC else f"{mine['time_ratio']:.3f}"
        late = "" if mine.get("is_settled", True) else "  late"
        print(
            f"{program:<10} {share:>6} {way:<10}{mine['requested_bytes'] / MIB:11.2f}"
            f"{mine['peak_bytes'] / MIB:11.2f}{mine['ratio']:8.4f}{hits}{maps}"
            f"{mine['seconds'] * 1e3:8.1f}{ratio:>13}{mine['steps']:7}{mine['skipped']:9}{late}",
            flush=True,
        )


def goal_misses(figures: Figures, programs: Sequence[str], percents: Sequence[int]) -> list[str]:
    """Return what misses its goal."""
    misses = [
        f"{each}: the numbers differ" for each in programs if not figures[f"{each}_same_bits"]
    ]
    for program in programs:
        for percent in percents:
            name = f"{program}_{PLANNED}_{percent}"
            if not figures[f"{name}_is_settled"]:
                misses.append(f"{name} is not settled")
            if figures[f"{name}_ratio"] > GOAL_RATIO:
                misses.append(f"{name}_ratio is {figures[f'{name}_ratio']:.4f}")
            if figures[f"{name}_hit_share"] < GOAL_HITS[program]:
                misses.append(f"{name}_hit_share is {figures[f'{name}_hit_share']:.4f}")
            if figures[f"{name}_time_ratio"] > GOAL_TIME:
                misses.append(f"{name}_time_ratio is {figures[f'{name}_time_ratio']:.3f}")
    return misses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter and less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", choices=PROGRAMS, help="run one program")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    programs = (options.only,) if options.only else PROGRAMS
    figures: Figures = {}
    print("Peaks in MiB; a ratio of times below 1: faster than without planned addresses")
    print_heading()
    for program in programs:
        figures |= measure(program, effort)
        print_rows(program, figures, effort.percents)
    misses = goal_misses(figures, programs, effort.percents)
    print(
        "\nGoals (ratio <= 1.02, hits >= 99 %, of experts >= 95 %, time ratio <= 1.00, same bits): "
        + ("missed: " + "; ".join(misses) if misses else "reached")
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
