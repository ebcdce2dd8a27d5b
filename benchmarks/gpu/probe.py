"""What is looked at beside the time of steps: counters of the stable ones, and kernels.

A probe is asked around the timed steps. What `end` returns is per step: whole numbers where every
step does the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import measure

if TYPE_CHECKING:
    from benchmarks.gpu.trainer import Figures, Training

# Counters of a session's statistics, and of an allocator's, by the figure that says it per step.
OF_SESSION = {
    "step_rescues": "oom_rescues",
    "step_replans": "replans",
    "step_out_bytes": "swapped_out_bytes",
    "step_in_bytes": "swapped_in_bytes",
    "step_repeated": "recomputed_regions",
}
# Taking memory from the driver and giving it back, piece by piece where that is counted; and moving
# what is free to other addresses. The first counter that there is counts.
OF_ALLOCATOR = {
    "step_maps": ("maps", "num_device_alloc"),
    "step_unmaps": ("unmaps", "num_device_free"),
    "step_moved_bytes": ("moved_bytes",),
}
COPIES = ("Memcpy", "Memset")


class Probe:
    """Looks at a session's counters, at the allocator's, and once at the kernels of a step."""

    watches_device = True  # by a thread of its own, before time is taken

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._plans: list[Any] = []  # of each timed step

    def prepare(self) -> None:
        """Do what has to be done before a session begins."""

    def begin(self, training: Training, session: Any) -> None:  # noqa: ANN401 - swapkit's Session
        """Look at the counters before the timed steps."""
        self._plans = []
        self._before = self.read(training, session)

    def step(self, training: Training, session: Any) -> None:  # noqa: ANN401
        """Train one of the timed steps; remember what plan it follows."""
        if session is not None:
            self._plans.append(session.plan)
        training.step()

    def end(self, training: Training, session: Any) -> Figures:  # noqa: ANN401
        """Look again; return what a step adds to each."""
        after, steps = self.read(training, session), training.setup.timed_steps
        found = {key: (after[key] - self._before[key]) / steps for key in self._before}
        return found | describe_plans(self._plans)

    def after(self, training: Training, _session: Any) -> Figures:  # noqa: ANN401
        """Return what is only found by steps that are not timed."""
        return count_kernels(training) if measure.is_cuda(training.setup.device) else {}

    def read(self, training: Training, session: Any) -> dict[str, float]:  # noqa: ANN401
        """Return all counters as they are now."""
        setup = training.setup
        found: dict[str, float] = {}
        if session is not None:
            found |= {key: getattr(session.stats, name) for key, name in OF_SESSION.items()}
        stats = measure.allocator_stats(setup.device, pool=setup.has_pool)
        for key, names in OF_ALLOCATOR.items():
            name = next((name for name in names if name in stats), None)
            if name is not None:
                found[key] = stats[name]
        return found


def describe_plans(plans: list[Any]) -> Figures:
    """Return what steps were to copy out, and as many back; and how often the plan was another."""
    if not plans or any(plan is None or plan.prediction is None for plan in plans):
        return {}
    planned_bytes = sum(plan.prediction.swapped_bytes for plan in plans)
    changes = sum(one.decisions is not other.decisions for one, other in pairwise(plans))
    return {"planned_bytes": planned_bytes / len(plans), "plan_changes": changes}


def count_kernels(training: Training) -> Figures:
    """Return how long the kernels of forward and backward run in one step, by torch's profiler.

    Nothing where it sees no kernels, as on a device that is simulated.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        training.backward()
        torch.cuda.synchronize()
    training.update()
    events = [event for event in profiled.events() if is_kernel(event)]
    if not events:
        return {}
    total_us = sum(event.self_device_time_total for event in events)
    return {"kernels": len(events), "kernel_ms": total_us / 1e3}


def is_kernel(event: Any) -> bool:  # noqa: ANN401 - the profiler's
    """Return whether an event of the profiler is a kernel that ran on the device."""
    on_device = event.device_type.name == "CUDA"
    return on_device and not event.name.startswith(COPIES)
