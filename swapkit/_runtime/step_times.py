"""How long steps have taken, by what they do."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque

import torch

STEPS_TIMED = 32  # the latest ones of a kind, whose median is the time of a step
KINDS_KEPT = 16
# Of a step: a device that is done so soon after the host has waited for it, not the host for the
# device. One that is the limit has much of backward left when all of it was queued.
BEHIND = 0.25


class StepClock:
    """Takes the time of one step after the other.

    A device other than the CPU works behind the host's back. Where the time decides about plans,
    the host waits for it at both ends of a step.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare to take the time of steps on a device."""
        self._device = device
        self._waits = False
        self._began = 0.0

    def begin(self, *, decides: bool) -> None:
        """A step begins; `decides`: its time is compared with that of others."""
        self._waits = decides and self._device.type != "cpu"
        self._wait()
        self._began = time.perf_counter()

    def end(self) -> tuple[float, bool]:
        """Return the seconds that it took, and whether the host was the limit, as far as seen."""
        queued = time.perf_counter() - self._began
        if not self._waits:
            return queued, False
        self._wait()
        done = time.perf_counter() - self._began
        return done, done - queued < BEHIND * done

    def _wait(self) -> None:
        """Wait for the stream of this thread: a step is done when its own work is."""
        if self._waits:
            torch.get_device_module(self._device).current_stream(self._device).synchronize()


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
