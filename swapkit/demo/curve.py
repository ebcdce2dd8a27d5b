"""Device bytes over time, as plain values."""

from collections.abc import Iterable

from swapkit.demo.messages import Series

POINTS = 400


def thin_out(points: Iterable[tuple[float, int]], *, count: int = POINTS) -> Series:
    """Reduce a curve to few points without losing its peaks.

    Args:
        points: (seconds, bytes), in order of time.
        count: number of intervals of equal length.

    Returns:
        The highest and the last point of every interval that has points.
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
