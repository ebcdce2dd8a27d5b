"""Predictions of sessions compared with measurements: memory and step time, on the CPU.

The demo's model and three small ones of `transformers`, each trained under budgets of 80, 60, 45,
30 and 20 % of the memory of a step beyond parameters, gradients and optimizer states. Each run is
its own session: warm-up, search, then some stable steps, which are measured. Reserved bytes are
measured after the pool has released memory left over from the search.

`--json FILE` writes one flat object: `runs`, `peak_error_median`, `peak_error_worst` (reserved
bytes over the predicted bytes in use; a plan may leave a part of the budget to the pool, so that it
has to move less memory: up to that part is no error), `in_use_error_median`, `in_use_error_worst`,
`seconds_error_median`, `seconds_error_worst`, and `RUN_seconds_error` and others for each run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import swapkit
from swapkit._runtime.allocators.installation import installed_pool
from swapkit.testing import planning_at_once

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._session_models import JOBS, Training

if TYPE_CHECKING:
    from benchmarks._session_models import Job
SHARES = (0.8, 0.6, 0.45, 0.3, 0.2)
MOST_STEPS = 16  # by then a session must be stable
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. There is no prediction if no plan fits."""

    name: str
    budget_bytes: int
    in_use_bytes: int
    reserved_bytes: int
    seconds: float
    rescues: int
    predicted_bytes: int | None
    predicted_seconds: float | None
    left_bytes: int  # part of the budget that the plan does not use

    def errors(self) -> dict[str, float]:
        """Return the deviations of the measurements from the prediction."""
        if self.predicted_bytes is None or self.predicted_seconds is None:
            return {}
        most_bytes = self.predicted_bytes + self.left_bytes
        nearest_bytes = max(self.predicted_bytes, min(self.reserved_bytes, most_bytes))
        return {
            "peak_error": self.reserved_bytes / nearest_bytes - 1,
            "in_use_error": self.in_use_bytes / self.predicted_bytes - 1,
            "seconds_error": self.seconds / self.predicted_seconds - 1,
        }


def memory(key: str) -> int:
    return swapkit.memory_stats()[f"{key}_bytes.all.peak"]


def measure_plain(job: Job) -> tuple[int, int, float]:
    """Return the bytes in use between steps, their peak, and the seconds of a step."""
    training = Training(job)
    training.step()
    gc.collect()
    swapkit.reset_peak_memory_stats()
    between_bytes = memory("allocated")
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - begin)
    return between_bytes, memory("allocated"), statistics.median(seconds)


def measure(name: str, job: Job, budget_bytes: int, steps: int) -> Result:
    gc.collect()
    training = Training(job)
    with swapkit.budget(budget_bytes, training.model, training.optimizer) as session:
        with planning_at_once():
            for _ in range(MOST_STEPS):
                training.step()
                if session.stage == "stable":
                    break
        installed_pool().trim()
        swapkit.reset_peak_memory_stats()
        rescues = session.stats.oom_rescues
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - begin)
        stats, plan = session.stats, session.plan
    return Result(
        name=name,
        budget_bytes=budget_bytes,
        in_use_bytes=memory("allocated"),
        reserved_bytes=memory("reserved"),
        seconds=statistics.median(seconds),
        rescues=stats.oom_rescues - rescues,
        predicted_bytes=stats.predicted_peak_bytes,
        predicted_seconds=stats.predicted_step_seconds,
        left_bytes=0 if plan is None else budget_bytes - plan.budget_bytes,
    )


def print_result(result: Result, plain_seconds: float) -> None:
    errors = result.errors()
    if not errors:
        print(f"{result.name:12} no plan fits {result.budget_bytes / MIB:.1f} MiB")
        return
    assert result.predicted_bytes is not None
    assert result.predicted_seconds is not None
    print(
        f"{result.name:12}{result.budget_bytes / MIB:9.1f}{result.predicted_bytes / MIB:10.1f}"
        f"{result.reserved_bytes / MIB:10.1f}{errors['peak_error']:8.1%}"
        f"{errors['in_use_error']:8.1%}{result.predicted_seconds:10.4f}{result.seconds:10.4f}"
        f"{errors['seconds_error']:8.1%}{result.seconds / plain_seconds:8.2f}{result.rescues:8}",
        flush=True,
    )


def summarize(results: list[Result]) -> dict[str, float]:
    """Return the median and worst absolute errors, and the errors of each run."""
    known = [result for result in results if result.errors()]
    figures: dict[str, float] = {"runs": len(known), "without_plan": len(results) - len(known)}
    for key in ("peak_error", "in_use_error", "seconds_error"):
        found = [abs(result.errors()[key]) for result in known]
        figures[f"{key}_median"] = statistics.median(found)
        figures[f"{key}_worst"] = max(found)
    figures["rescues"] = sum(result.rescues for result in known)
    for result in known:
        figures.update({f"{result.name}_{key}": each for key, each in result.errors().items()})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(JOBS), help="comma-separated")
    parser.add_argument(
        "--shares", default=",".join(map(str, SHARES)), help="shares of the activations"
    )
    parser.add_argument("--steps", type=int, default=10, help="stable steps, for the median")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    print(
        f"{'':12}{'budget':>9}{'predicted':>10}{'reserved':>10}{'error':>8}{'in use':>8}"
        f"{'predicted':>10}{'seconds':>10}{'error':>8}{'ratio':>8}{'rescues':>8}"
    )
    results = []
    for model in options.models.split(","):
        job = JOBS[model]()
        between_bytes, peak_bytes, plain_seconds = measure_plain(job)
        for share in map(float, options.shares.split(",")):
            budget_bytes = int(between_bytes + share * (peak_bytes - between_bytes))
            name = f"{model}_{share:.0%}".rstrip("%")
            results.append(measure(name, job, budget_bytes, options.steps))
            print_result(results[-1], plain_seconds)
    figures = summarize(results)
    print(
        f"{figures['runs']:.0f} runs: bytes reserved {figures['peak_error_median']:.1%} from the "
        f"prediction (worst {figures['peak_error_worst']:.1%}), in use "
        f"{figures['in_use_error_median']:.1%}, seconds {figures['seconds_error_median']:.1%} "
        f"(worst {figures['seconds_error_worst']:.1%})"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
