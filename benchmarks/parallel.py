"""Training on several ranks within a budget: torch's parallel schemes, bit by bit.

Each program (`_parallel_programs.py`) trains on 2 or 4 gloo ranks of this machine: without a
budget, then in sessions on every rank with 85 and 60 per cent of the memory that the rank took. In
the row "budget of rank 0" the other ranks have more than they take. The figures are those of the
worst rank:

- `same`: losses, parameters, buffers, optimizer states and random state have the bits of plain
  training, on every rank.
- `held`: no rank reserved more than its budget.
- `planned`: every rank followed a plan at the end; `rescues`: of its last steps.
- `trace`: most bytes of the recorded step over the most bytes of a plain one, less 1.
- `predicted`: the plan's predicted step over the measured one, less 1.
- `time`: the measured step over the plain one.
- "needs": the smallest budget for a plan of the worst rank's recorded step; that a program runs out
  of memory with less is no miss.
- `moved`: bytes that `swapkit.offload()` moved in a step over those that autograd saved and nobody
  else holds.

`--json FILE` writes one flat object: `ddp_85_is_planned`, `ddp_85_trace_error`, ..., `ddp_moved`.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._parallel_programs import ROWS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BENCHMARKS = Path(__file__).resolve().parent
PERCENTS = (85, 60)
# Ranks that spin while they wait would take the time of those that work.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
GOAL_MOVED, GOAL_TRACE, GOAL_PREDICTED = 0.95, 0.02, 0.10
GOAL_TIME = 1.10  # where one stage of a pipeline has a budget

Figures = dict[str, Any]


def run(names: Sequence[str], ranks: int, percents: Sequence[int]) -> Iterator[Figures]:
    """Yield for each program what its ranks found, by way. One that fails ends its launch."""
    while names:
        done: Figures = {"name": names[0]}
        with tempfile.TemporaryFile("w+") as errors:
            with _launch(names, ranks, percents, errors) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        printed = json.loads(line)
                        done[printed["way"]] = printed["ranks"]
                    if len(done) == 1 + len(("plain", "offload", *percents)):
                        yield done
                        names = names[1:]
                        done = {"name": names[0]} if names else {}
            errors.seek(0)
            text = errors.read()
        if names:
            yield {**done, "failed": _find_error(text)}
            names = names[1:]


def _launch(
    names: Sequence[str], ranks: int, percents: Sequence[int], errors: IO[str]
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        str(BENCHMARKS / "_parallel_training.py"), ",".join(map(str, percents)), *names,
    ]  # fmt: skip
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(BENCHMARKS.parent)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )


def summarize(found: Figures, percents: Sequence[int]) -> Figures:
    """Return the figures of a program: those of its worst rank."""
    name = found["name"]
    if "offload" not in found:
        return {f"{name}_failed": found["failed"]}
    plain = found["plain"]
    figures: Figures = {f"{name}_moved": min(each["moved_share"] for each in found["offload"])}
    for percent in percents:
        start, within = f"{name}_{percent}", found.get(str(percent))
        if within is None:
            least = max(each["least_bytes"] / each["peak_bytes"] for each in plain)
            is_too_small = percent < 100 * least
            end, value = ("least", least) if is_too_small else ("failed", found["failed"])
            figures[f"{start}_{end}"] = value
            break
        figures |= {f"{start}_{key}": value for key, value in _worst(within, plain).items()}
    return figures


def _worst(within: Sequence[Figures], plain: Sequence[Figures]) -> Figures:
    both = list(zip(within, plain, strict=True))
    peaks = [(each["trace_peak_bytes"], other["peak_bytes"]) for each, other in both]
    pairs = [(each["predicted_seconds"], each["seconds"]) for each in within]
    return {
        "same": all(each["same"] for each in within),
        "held": all(each["peak_bytes"] <= each["limit_bytes"] for each in within),
        "is_planned": all(each["is_planned"] for each in within),
        "stage": "/".join(sorted({each["stage"] for each in within})),
        "rescues": max(each["settled_rescues"] for each in within),
        "trace_error": _largest(peaks),
        "time": max(each["seconds"] / other["seconds"] for each, other in both),
        "predicted_error": _largest(pairs),
    }


def _largest(pairs: Any) -> float | None:  # noqa: ANN401 - pairs of numbers or None
    """Return the ratio of a pair, less 1, that is farthest from 0; None: a number is not known."""
    listed = list(pairs)
    if any(one is None or not other for one, other in listed):
        return None
    errors: list[float] = [one / other - 1 for one, other in listed]
    return max(errors, key=abs)


# ---- tables --------------------------------------------------------------------------------------


def print_heading() -> None:
    print(
        f"{'program':<24} {'ranks':>5} {'moved':>7} {'budget':>7} {'bits':>5} {'held':>5} "
        f"{'planned':>8} {'rescues':>8} {'trace':>8} {'predicted':>10} "
        f"{'time':>6}  stage"
    )


def print_rows(name: str, figures: Figures, percents: Sequence[int]) -> None:
    row = ROWS_BY_NAME[name]
    head = f"{row.label:<24} {row.ranks:5}"
    if f"{name}_failed" in figures:
        print(f"{head} failed: {figures[f'{name}_failed']}", flush=True)
        return
    for percent in percents:
        mine = {
            key.removeprefix(f"{name}_{percent}_"): value
            for key, value in figures.items()
            if key.startswith(f"{name}_{percent}_")
        }
        start = f"{head} {figures[f'{name}_moved']:7.1%} {percent:6}%"
        if "least" in mine:
            print(
                f"{start} out of memory: the step of a rank needs {mine['least']:.0%}", flush=True
            )
            break
        if not mine:  # the one before has failed
            break
        if "failed" in mine:
            print(f"{start} {mine['failed']}", flush=True)
            break
        print(
            f"{start} {_yes(mine['same']):>5} {_yes(mine['held']):>5} "
            f"{_yes(mine['is_planned']):>8} {mine['rescues']:8} {_percent(mine['trace_error']):>8} "
            f"{_percent(mine['predicted_error']):>10} {_times(mine['time']):>6}  {mine['stage']}",
            flush=True,
        )


def _yes(value: bool) -> str:  # noqa: FBT001 - a figure
    return "yes" if value else "NO"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _find_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "Error" in line]
    lines = [line for line in errors if "swapkit" in line] or errors
    return (lines or ["no output"])[0][:120]


def find_misses(figures: Figures) -> list[str]:
    """Return the figures that miss their goals."""
    return [
        key
        for key, value in figures.items()
        if any(key.endswith(ending) and is_missed(value) for ending, is_missed in MISSES.items())
    ]


MISSES: dict[str, Callable[[Any], bool]] = {
    "_failed": bool,
    "_same": operator.not_,
    "_held": operator.not_,
    "_is_planned": operator.not_,
    "_moved": lambda share: share < GOAL_MOVED,
    "1f1b_first_60_time": lambda ratio: ratio is None or ratio > GOAL_TIME,
    "_trace_error": lambda error: error is None or abs(error) > GOAL_TRACE,
    "_predicted_error": lambda error: error is None or abs(error) > GOAL_PREDICTED,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS_BY_NAME, default=list(ROWS_BY_NAME))
    parser.add_argument("--percents", nargs="+", type=int, default=PERCENTS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures: Figures = {}
    print_heading()
    for ranks in (2, 4):
        names = [each for each in options.only if ROWS_BY_NAME[each].ranks == ranks]
        for found in run(names, ranks, options.percents):
            mine = summarize(found, options.percents)
            print_rows(found["name"], mine, options.percents)
            figures |= mine
    misses = find_misses(figures)
    print(
        f"\nGoals (same bits, held, planned, moved >= {GOAL_MOVED:.0%}, trace within "
        f"{GOAL_TRACE:.0%}, predicted within {GOAL_PREDICTED:.0%}, rank 0 at 60 %: {GOAL_TIME}): "
        + (f"missed: {', '.join(misses)}" if misses else "reached")
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
