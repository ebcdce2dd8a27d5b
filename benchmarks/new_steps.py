"""Time of steps for which a session has no plan yet: the first ones, and new sequence lengths.

A model of small blocks (8 layers, width 64), on the CPU with one compute thread, all in turn:

- `plan_step_ratio`: steps while the session makes its plan, over those of a session that makes
  none (both under rescue, with 70 % of the activations' memory): the median of the rounds' ratios
  of medians. `plan_steps`: their number. `plan_at_once_ratio`: the same for the one step that waits
  for its plan under `planning_at_once`;
- `lengths_ratio`: 60 steps with a new sequence length each, within that budget, over the same
  steps without one: the median over steps of the median over rounds. `lengths_late_ratio`: of the
  last 40 of them. `lengths_recordings`, `lengths_rescues` (of the last 40).

All times exclude the time in which the training thread was runnable but no processor was free:
other programs cause it, and so does the planner if there are too few processors. Including it:
`plan_step_wall_ratio`, `lengths_wall_ratio`.

`--json FILE` writes one flat object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import swapkit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._host_ways import Training, make_size
from benchmarks.host_ratio import measure_memory
from swapkit._runtime.recording.recorder import Recorder
from swapkit.testing import planning_at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.session.session import Session

LAYERS, DIM, TOKENS = 8, 64, 256
SHARE = 0.7
SCHEDULED = Path("/proc/thread-self/schedstat")
PLAN_TARGET, LENGTHS_TARGET = 1.5, 1.25
MOST_STEPS, NEIGHBOURS = 400, 12
STEPS, EARLY_STEPS = 60, 20


class Taken(NamedTuple):
    """Seconds of a step: in total, and without the time its thread waited for a processor."""

    seconds: float
    own_seconds: float


def time_step(training: Training) -> Taken:
    begin, waited = time.perf_counter(), seconds_without_processor()
    training.step()
    seconds = time.perf_counter() - begin
    return Taken(seconds, seconds - (seconds_without_processor() - waited))


def seconds_without_processor() -> float:
    """Return how long this thread was runnable but not running; 0: the kernel has no figure."""
    try:
        return int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def median_of(steps: Sequence[Taken]) -> Taken:
    return Taken(*map(statistics.median, zip(*steps, strict=True)))


# ---- planning ------------------------------------------------------------------------------------


def time_planning(training: Training, limit_bytes: int) -> list[Taken]:
    """Return the times of the steps while the first plan is made."""
    seconds: list[Taken] = []
    with swapkit.budget(limit_bytes, training.model, training.optimizer) as session:
        for _ in range(2):
            training.step()  # the last one is recorded
        while session.stage == "warmup" and len(seconds) < MOST_STEPS:
            seconds.append(time_step(training))
    return seconds


def time_waiting(training: Training, limit_bytes: int) -> float:
    """Return the seconds of the recorded step, which waits for its plan."""
    with (
        planning_at_once(),
        swapkit.budget(limit_bytes, training.model, training.optimizer),
    ):
        training.step()
        return time_step(training).seconds


def time_rescue(training: Training, limit_bytes: int) -> Taken:
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy="rescue"):
        for _ in range(2):
            training.step()
        return median_of([time_step(training) for _ in range(NEIGHBOURS)])


def measure_planning(rounds: int) -> dict[str, float]:
    training = Training(make_size(LAYERS, DIM, TOKENS))
    between_bytes, peak_bytes = measure_memory(training)
    limit_bytes = int(between_bytes + SHARE * (peak_bytes - between_bytes))
    ratios, walls, at_once, counts = [], [], [], []
    for _ in range(rounds):
        gc.collect()
        before = time_rescue(training, limit_bytes)
        beside = time_planning(training, limit_bytes)
        after = time_rescue(training, limit_bytes)
        neighbour = median_of([before, after])
        found = median_of(beside)
        walls.append(found.seconds / neighbour.seconds)
        ratios.append(found.own_seconds / neighbour.own_seconds)
        counts.append(len(beside))
        at_once.append(time_waiting(training, limit_bytes) / neighbour.seconds)
    return {
        "plan_step_ratio": statistics.median(ratios),
        "plan_step_wall_ratio": statistics.median(walls),
        "plan_steps": statistics.median(counts),
        "plan_at_once_ratio": statistics.median(at_once),
    }


# ---- lengths -------------------------------------------------------------------------------------


class Lengths(Training):
    """Training with a different number of tokens in each step."""

    def step_of(self, tokens: int) -> Taken:
        whole = self._windows
        self._windows = whole[:, : tokens + 1]
        try:
            return time_step(self)
        finally:
            self._windows = whole


def train_lengths(lengths: Sequence[int], limit_bytes: int | None) -> tuple[list[Taken], list[int]]:
    """Return the time of each step and its rescues; without a budget there are no rescues."""
    training = Lengths(make_size(LAYERS, DIM, TOKENS))
    for _ in range(2):
        training.step()
    if limit_bytes is None:
        return [training.step_of(each) for each in lengths], []
    seconds, rescues = [], []
    with swapkit.budget(limit_bytes, training.model, training.optimizer) as session:
        for each in lengths:
            before = session.stats.oom_rescues
            seconds.append(training.step_of(each))
            rescues.append(session.stats.oom_rescues - before)
        check(session)
    return seconds, rescues


def check(session: Session) -> None:
    assert session.stats.peak_bytes <= session.limit_bytes


def measure_lengths(rounds: int) -> dict[str, float]:
    lengths = random.Random(0).sample(range(TOKENS // 2, TOKENS + 1), STEPS)
    between_bytes, peak_bytes = measure_memory(Training(make_size(LAYERS, DIM, TOKENS)))
    limit_bytes = int(between_bytes + SHARE * (peak_bytes - between_bytes))
    recordings = 0
    start = Recorder.start

    def note(recorder: Recorder) -> None:
        nonlocal recordings
        recordings += 1
        start(recorder)

    found: list[list[float]] = []
    walls: list[float] = []
    late = []
    Recorder.start = note  # type: ignore[method-assign,assignment]
    try:
        for _ in range(rounds):
            gc.collect()
            plain, _ = train_lengths(lengths, None)
            budgeted, rescues = train_lengths(lengths, limit_bytes)
            pairs = list(zip(budgeted, plain, strict=True))
            found.append([own.own_seconds / each.own_seconds for own, each in pairs])
            walls.append(statistics.median(own.seconds / each.seconds for own, each in pairs))
            late.append(sum(rescues[EARLY_STEPS:]))
    finally:
        Recorder.start = start  # type: ignore[method-assign]
    medians = [statistics.median(each) for each in zip(*found, strict=True)]
    return {
        "lengths_ratio": statistics.median(medians),
        "lengths_wall_ratio": statistics.median(walls),
        "lengths_late_ratio": statistics.median(medians[EARLY_STEPS:]),
        "lengths_recordings": recordings / rounds,
        "lengths_rescues": statistics.median(late),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    figures = measure_planning(options.rounds)
    print(
        f"while a plan is made, in {figures['plan_steps']:.0f} steps: "
        f"{figures['plan_step_ratio']:.2f} times a step without that (at most {PLAN_TARGET}; "
        f"{figures['plan_step_wall_ratio']:.2f} with waits for a processor); "
        f"one that waits for it: {figures['plan_at_once_ratio']:.1f}",
        flush=True,
    )
    figures |= measure_lengths(options.rounds)
    print(
        f"a new length in each of {STEPS} steps: {figures['lengths_ratio']:.2f} times plain "
        f"(at most {LENGTHS_TARGET}), {figures['lengths_late_ratio']:.2f} after {EARLY_STEPS} "
        f"of them; {figures['lengths_recordings']:.1f} recordings, "
        f"{figures['lengths_rescues']:.0f} late rescues"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
