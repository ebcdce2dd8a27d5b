"""How long steps have taken, by what they do."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque

import torch

from swapkit.planning.outcomes import Timing

STEPS_TIMED = 32  # the latest ones of a kind, whose median is the time of a step
KINDS_KEPT = 16
# Of a step: a device that is done so soon after the host has waited for it, not the host for the
# device. One that is the limit has much of backward left when all of it was queued.
BEHIND = 0.25


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

        Where no step has led, the pace is that of a step alone.
        """
        if self._device.type == "cpu":
            timing = Timing.HOST
        elif timing is Timing.PACE and self._ended is None:
            timing = Timing.DEVICE
        self._timing = timing
        if timing is not Timing.PACE:
            self._ended = None
        if timing in {Timing.DEVICE, Timing.LEAD}:
            self._stream().synchronize()
        self._began = time.perf_counter()

    def end(self) -> tuple[float, bool]:
        """Return the seconds that it took, and whether the host was the limit, as far as seen."""
        queued = time.perf_counter() - self._began
        if self._timing is Timing.LEAD:
            self._ended = self._mark()
        if self._timing is Timing.PACE:
            return self._from_end_to_end(), False
        if self._timing is not Timing.DEVICE:
            return queued, False
        self._stream().synchronize()
        done = time.perf_counter() - self._began
        return done, done - queued < BEHIND * done

    def _from_end_to_end(self) -> float:
        before, self._ended = self._ended, None
        assert before is not None
        ended = self._mark()
        ended.synchronize()
        return before.elapsed_time(ended) / 1e3

    def _mark(self) -> torch.Event:
        event: torch.Event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record(self._stream())
        return event

    def _stream(self) -> torch.Stream:
        """The stream of this thread: a step is done when its own work is."""
        stream: torch.Stream = torch.get_device_module(self._device).current_stream(self._device)
        return stream


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
