"""Steps until sessions are stable, rescues after that, and the cost of following a plan.

The demo's model, on the CPU with one compute thread:

- the steps until a session with memory for half of the activations is stable, and the rescues in
  the stable steps after that (200 of them);
- a stable session compared with the same swaps chosen by hand, with
  `swapkit.offload(model, "blocks.3", ...)` for half of the blocks, in a session without a plan.
  Both run in every round and alternate in going first. `overhead`: the median of the rounds'
  ratios, minus one; `overhead_cpu`: the same for CPU time, which other programs disturb less.

`--json FILE` writes one flat object: `steps_until_stable`, `stable_steps`, `stable_rescues`,
`replans`, `session_seconds`, `by_hand_seconds`, `overhead`, `overhead_cpu`, `session_bytes`,
`by_hand_bytes` (swapped in a step).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import swapkit
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import BEFORE, EventKind
from swapkit.testing import planning_at_once

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._session_models import JOBS, Training
from benchmarks.prediction import measure_plain

if TYPE_CHECKING:
    from benchmarks._session_models import Job
    from swapkit._runtime.session.session import Session
    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace

MOST_STEPS = 20
STEPS_A_ROUND, UNTIMED = 6, 2
SWAPPED = r"blocks\.[0-3](\..*)?"


class Times(NamedTuple):
    """Times of a step."""

    seconds: float
    cpu_seconds: float
    swapped_bytes: float


class SwapBlocks:
    """A policy that swaps all saved tensors of some blocks."""

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        used = {event.storage for event in trace.events if event.kind is EventKind.USE}
        decisions = tuple(
            Decision(storage=number, action=Action.SWAP)
            for number, each in enumerate(trace.storages)
            if each.is_saved and number in used and each.birth != BEFORE
            if re.fullmatch(SWAPPED, each.module)
        )
        return Plan(decisions=decisions, budget_bytes=machine.budget_bytes)


def count_rescues(job: Job, share: float, steps: int) -> dict[str, float]:
    between_bytes, peak_bytes, _ = measure_plain(job)
    gc.collect()
    training = Training(job)
    budget_bytes = int(between_bytes + share * (peak_bytes - between_bytes))
    until = MOST_STEPS
    with swapkit.budget(budget_bytes, training.model, training.optimizer) as session:
        with planning_at_once():
            for step in range(MOST_STEPS):
                training.step()
                if session.stage == "stable":
                    until = step + 1
                    break
        before = session.stats
        for _ in range(steps):
            training.step()
        after = session.stats
    return {
        "steps_until_stable": until,
        "stable_steps": steps,
        "stable_rescues": after.oom_rescues - before.oom_rescues,
        "replans": after.replans - before.replans,
        "peak_share": after.peak_bytes / budget_bytes,
    }


def time_steps(session: Session, training: Training) -> Times:
    seconds, cpu_seconds = [], []
    with session:
        for step in range(STEPS_A_ROUND):
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            training.step()
            if step >= UNTIMED:
                seconds.append(time.perf_counter() - begin)
                cpu_seconds.append(time.thread_time() - cpu_begin)
        swapped_bytes = session.stats.swapped_out_bytes / STEPS_A_ROUND
    return Times(statistics.median(seconds), statistics.median(cpu_seconds), swapped_bytes)


def compare(job: Job, rounds: int) -> dict[str, float]:
    planned, by_hand = Training(job), Training(job)
    swapkit.offload(by_hand.model, SWAPPED)
    whole = "8GiB"  # ample: only chosen tensors move
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        with swapkit.budget(whole, planned.model, planned.optimizer, policy=SwapBlocks()) as found:
            for _ in range(3):
                planned.step()
            found.save_plan(path)

        def run_planned() -> None:
            session = swapkit.budget(whole, planned.model, planned.optimizer, plan=path)
            ours.append(time_steps(session, planned))
            assert session.stats.replans == 0

        def run_by_hand() -> None:
            session = swapkit.budget(whole, by_hand.model, by_hand.optimizer, policy="rescue")
            theirs.append(time_steps(session, by_hand))

        ours: list[Times] = []
        theirs: list[Times] = []
        for number in range(rounds):
            for run in (run_planned, run_by_hand)[:: 1 if number % 2 == 0 else -1]:
                run()
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "session_seconds": statistics.median(each.seconds for each in ours),
        "by_hand_seconds": statistics.median(each.seconds for each in theirs),
        "overhead": statistics.median(a.seconds / b.seconds for a, b in pairs) - 1,
        "overhead_cpu": statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs) - 1,
        "session_bytes": ours[-1].swapped_bytes,
        "by_hand_bytes": theirs[-1].swapped_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.5, help="share of the activations")
    parser.add_argument("--steps", type=int, default=200, help="stable steps to watch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    job = JOBS["demo"]()
    figures = count_rescues(job, options.share, options.steps)
    print(
        f"stable after {figures['steps_until_stable']} steps; in {figures['stable_steps']} more "
        f"{figures['stable_rescues']} rescues, {figures['replans']} replans",
        flush=True,
    )
    figures |= compare(job, options.rounds)
    print(
        f"session {figures['session_seconds']:.4f} s, by hand {figures['by_hand_seconds']:.4f} s: "
        f"{figures['overhead']:+.1%}, {figures['overhead_cpu']:+.1%} of the computing thread; "
        f"{figures['session_bytes'] / 2**20:.1f} and {figures['by_hand_bytes'] / 2**20:.1f} MiB"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
