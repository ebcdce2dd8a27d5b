"""Device bytes over time, as plain values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swapkit.demo.messages import Series

POINTS = 400
_NS_PER_S = 1e9


def thin_out(points: Iterable[tuple[float, int]], *, count: int = POINTS) -> Series:
    """Reduce a curve to few points without losing its peaks.

    Args:
        points: (seconds, bytes), seconds not descending.
        count: number of intervals of equal length.

    Returns:
        Of every interval that has any: its highest point, and its last one if that is another.
    """
    curve = list(points)
    if len(curve) <= count:
        return tuple(curve)
    first, last = curve[0][0], curve[-1][0]
    scale = count / (last - first) if last > first else 0.0
    intervals: dict[int, list[tuple[float, int]]] = {}
    for point in curve:
        intervals.setdefault(int((point[0] - first) * scale), []).append(point)
    thinned: list[tuple[float, int]] = []
    for interval in intervals.values():
        highest = max(interval, key=lambda point: point[1])
        thinned.extend(dict.fromkeys((highest, interval[-1])))
    return tuple(thinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """Bytes alive after each of a sequence of allocations and frees."""

    times_ns: tuple[int, ...]
    totals: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.totals, default=0)

    def between(self, start_ns: int, end_ns: int) -> Iterator[tuple[float, int]]:
        """Give the points of [start_ns, end_ns), in seconds since its start.

        Args:
            start_ns: where it begins.
            end_ns: where it ends.
        """
        for time_ns, total in zip(self.times_ns, self.totals, strict=True):
            if start_ns <= time_ns < end_ns:
                yield (time_ns - start_ns) / _NS_PER_S, total


def live_bytes(changes: Iterable[tuple[int, int]]) -> LiveBytes:
    """Sum allocations and frees up.

    Args:
        changes: (time_ns, bytes: negative when freed), in any order.
    """
    ordered = sorted(changes, key=lambda change: change[0])
    totals: list[int] = []
    total = 0
    for _, nbytes in ordered:
        total += nbytes
        totals.append(total)
    return LiveBytes(times_ns=tuple(time_ns for time_ns, _ in ordered), totals=tuple(totals))
