"""How long steps have taken, by what they do."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque

STEPS_TIMED = 32  # the latest ones of a kind, whose median is the time of a step
KINDS_KEPT = 16


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
