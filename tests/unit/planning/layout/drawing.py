"""Lifetimes at random, for tests of layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from swapkit.planning.layout.lifetimes import FREE, Lifetimes

if TYPE_CHECKING:
    from numpy.typing import NDArray


def draw_lifetimes(seed: int, count: int, *, times: int = 60, most_bytes: int = 40) -> Lifetimes:
    """Return lifetimes with many equal times and sizes."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(-5, times, count)
    lives = 1 + (rng.pareto(1.0, count) * 3).astype(np.int64) % times
    return Lifetimes(starts, starts + lives, rng.integers(1, most_bytes, count))


def draw_steps(seed: int, count: int, *, period: int = 60) -> Lifetimes:
    """Return lifetimes of steps that repeat: some go on in the next one, some always live."""
    some = draw_lifetimes(seed, count, times=period)
    starts = some.starts % period
    return Lifetimes(starts, starts + some.ends - some.starts, some.nbytes, period=period)


def unroll(lifetimes: Lifetimes, offsets: NDArray[np.int64]) -> tuple[Lifetimes, NDArray[np.int64]]:
    """Return one step's lifetimes and offsets: an item that goes on lies there as two."""
    starts, ends, period = lifetimes.starts, lifetimes.ends, lifetimes.period
    goes_on = ends > (period or ends)
    rest = np.zeros(int(goes_on.sum()), np.int64)
    return (
        Lifetimes(
            np.append(starts, rest),
            np.append(np.where(goes_on, period, ends), ends[goes_on] - period),
            np.append(lifetimes.nbytes, lifetimes.nbytes[goes_on]),
        ),
        np.append(offsets, offsets[goes_on]),
    )


def draw_laminar(seed: int, count: int) -> Lifetimes:
    """Return lifetimes any two of which are nested or disjoint, as of a plain forward, backward."""
    rng = np.random.default_rng(seed)
    spans: list[tuple[int, int]] = [(0, 1 << 20)]
    for _ in range(count - 1):
        start, end = spans[int(rng.integers(len(spans)))]
        middle = (start + end) // 2
        inside = [(start, middle), (middle, end), (start + 1, end - 1)][int(rng.integers(3))]
        nests = all(b <= inside[0] or inside[1] <= a or (a <= inside[0] and inside[1] <= b)
                    or (inside[0] <= a and b <= inside[1]) for a, b in spans)  # fmt: skip
        if inside[0] < inside[1] and nests:
            spans.append(inside)
    columns = np.array(spans).T
    return Lifetimes(columns[0], columns[1], rng.integers(1, 1000, len(spans)))


def draw_packing(seed: int, count: int, side: int = 1 << 12) -> Lifetimes:
    """Return lifetimes that fill a square of time and bytes, with `side` bytes alive throughout."""
    rng = np.random.default_rng(seed)
    boxes = [(0, side, 0, side)]
    while len(boxes) < count:
        start, end, low, high = boxes.pop(int(rng.integers(len(boxes))))
        if end - start > high - low:
            cut = int(rng.integers(start + 1, end))
            boxes += [(start, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = int(rng.integers(low + 1, high))
            boxes += [(start, end, low, cut), (start, end, cut, high)]
        else:
            boxes.append((start, end, low, high))
    columns = np.array(boxes)[rng.permutation(len(boxes))].T
    return Lifetimes(columns[0], columns[1], columns[3] - columns[2])


def fix_some(lifetimes: Lifetimes, offsets: NDArray[np.int64], share: float) -> Lifetimes:
    """Return the lifetimes with some items fixed where a layout has them."""
    rng = np.random.default_rng(len(lifetimes))
    fixed = np.where(rng.random(len(lifetimes)) < share, offsets, FREE)
    return Lifetimes(lifetimes.starts, lifetimes.ends, lifetimes.nbytes, fixed)


def overlaps(lifetimes: Lifetimes, offsets: NDArray[np.int64]) -> bool:
    """Return whether any two items overlap, pair by pair."""
    starts, ends = lifetimes.starts, lifetimes.ends
    tops = offsets + lifetimes.nbytes
    in_time = (starts[:, None] < ends[None]) & (ends[:, None] > starts[None])
    in_bytes = (offsets[:, None] < tops[None]) & (tops[:, None] > offsets[None])
    both = in_time & in_bytes
    np.fill_diagonal(both, val=False)
    return bool(both.any())


def live_together(lifetimes: Lifetimes, one: int, other: int) -> bool:
    """Return whether two items live at the same time, time by time."""
    period = lifetimes.period or 1 << 20
    times = [
        {time % period for time in range(lifetimes.starts[each], lifetimes.ends[each])}
        for each in (one, other)
    ]
    return not times[0].isdisjoint(times[1])


SEEDS = st.integers(0, 1 << 30)
COUNTS = st.integers(1, 120)
