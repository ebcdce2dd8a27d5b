"""The times of steps, by kind of step."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from typing import NamedTuple

import torch

from swapkit.planning.selection.outcomes import Timing

STEPS_TIMED = 32  # per kind: the median of these latest steps is the step time
KINDS_KEPT = 16
BUSY = 0.9  # of a step's time: a host that is busy for this share is not ahead of the device


class StepTime(NamedTuple):
    """The time of a step: see `Outcome`."""

    seconds: float
    timing: Timing
    is_host_bound: bool = False


class StepClock:
    """Times one step after the other, on the thread that runs the steps."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to time steps on a device."""
        self._device = device
        self._timing = Timing.HOST
        self._began = time.perf_counter()  # a step that does not begin lasts from the last end
        self._ended: torch.Event | None = None  # the end on the device of a `Timing.LEAD` step

    def begin(self, timing: Timing) -> None:
        """Begin to time a step in this way.

        If the previous step was not timed as `Timing.LEAD`, `Timing.PACE` first waits until the
        device is idle.
        """
        self._timing = Timing.HOST if self._device.type == "cpu" else timing
        if self._timing is not Timing.PACE:
            self._ended = None
        elif self._ended is None:
            self._ended = self._mark()
            self._ended.synchronize()
        self._began = time.perf_counter()

    def end(self) -> StepTime:
        """Return the time of the step that ends."""
        began, self._began = self._began, time.perf_counter()
        queued = self._began - began
        before, self._ended = self._ended, None
        if self._timing is Timing.LEAD:
            self._ended = self._mark()
        if before is None:
            return StepTime(queued, self._timing)
        ended = self._mark()
        ended.synchronize()
        seconds = before.elapsed_time(ended) / 1e3
        return StepTime(seconds, Timing.PACE, queued >= BUSY * seconds)

    def _mark(self) -> torch.Event:
        """Record an event on this thread's stream, which holds the work of the step."""
        module = torch.get_device_module(self._device)
        event: torch.Event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))
        return event


class StepTimes:
    """Seconds of the latest steps of the latest kinds. Each kind of step has its own plan."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, kind: str, seconds: float) -> None:
        """Add the time of a step."""
        self._seconds.setdefault(kind, deque(maxlen=STEPS_TIMED)).append(seconds)
        self._seconds.move_to_end(kind)
        while len(self._seconds) > KINDS_KEPT:
            self._seconds.popitem(last=False)

    def latest(self, kind: str) -> float:
        """Return the seconds of the latest step of a kind; 0: there was no such step.

        Of the latest two the shorter one: another rank that planned at the end of its step has kept
        the next one waiting. Not of more: what steps do may have changed.
        """
        return min(list(self._seconds[kind])[-2:]) if kind in self._seconds else 0.0

    def median(self, kind: str) -> float | None:
        """Return the median seconds of a kind; None: there was no such step."""
        return statistics.median(self._seconds[kind]) if kind in self._seconds else None

    def others(self, kind: str) -> tuple[float, ...]:
        """Return the medians of all other kinds, latest first."""
        return tuple(
            statistics.median(seconds)
            for other, seconds in reversed(self._seconds.items())
            if other != kind
        )
