"""How long steps have taken, by what they do."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from typing import NamedTuple

import torch

from swapkit.planning.selection.outcomes import Timing

STEPS_TIMED = 32  # the latest ones of a kind, whose median is the time of a step
KINDS_KEPT = 16
BUSY = 0.9  # of the pace of steps: a host that is busy for so long is ahead of no device


class StepTime(NamedTuple):
    """How long a step took: see `Outcome`."""

    seconds: float
    timing: Timing
    is_host_bound: bool = False


class StepClock:
    """Takes the time of one step after the other. On the thread of the steps."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to take the time of steps on a device."""
        self._device = device
        self._timing = Timing.HOST
        self._began = 0.0
        self._ended: torch.Event | None = None  # by the device: the step that led

    def begin(self, timing: Timing) -> None:
        """A step begins, of which this time is wanted.

        Where the step before has not led, the pace is that of a step that begins with an idle
        device.
        """
        self._timing = Timing.HOST if self._device.type == "cpu" else timing
        if self._timing is not Timing.PACE:
            self._ended = None
        elif self._ended is None:
            self._ended = self._mark()
            self._ended.synchronize()
        self._began = time.perf_counter()

    def end(self) -> StepTime:
        """Return how long it took."""
        queued = time.perf_counter() - self._began
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
        """Mark the stream of this thread: a step is done when its own work is."""
        module = torch.get_device_module(self._device)
        event: torch.Event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))
        return event


class StepTimes:
    """Seconds of the latest steps of the latest kinds. One plan is for one kind of steps."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, kind: str, seconds: float) -> None:
        """Note a step."""
        self._seconds.setdefault(kind, deque(maxlen=STEPS_TIMED)).append(seconds)
        self._seconds.move_to_end(kind)
        while len(self._seconds) > KINDS_KEPT:
            self._seconds.popitem(last=False)

    def latest(self, kind: str) -> float:
        """Return the seconds of the latest step of a kind; 0: there was none."""
        return self._seconds[kind][-1] if kind in self._seconds else 0.0

    def median(self, kind: str) -> float | None:
        """Return the median of a kind; None: there was no step of it."""
        return statistics.median(self._seconds[kind]) if kind in self._seconds else None

    def others(self, kind: str) -> tuple[float, ...]:
        """Return the medians of the other kinds, the latest first."""
        return tuple(
            statistics.median(seconds)
            for other, seconds in reversed(self._seconds.items())
            if other != kind
        )
