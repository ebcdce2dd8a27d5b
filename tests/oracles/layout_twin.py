"""The placement and its check in plain NumPy.

Both give the same as the native core, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from swapkit._native.layout import BEST_FIT
from swapkit.errors import CorruptState, InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swapkit.planning.layout.lifetimes import Bytes, Lifetimes, Order


def measure_loads(lifetimes: Lifetimes) -> tuple[int, Bytes]:
    """Return the most bytes alive at any time, and those during each item's life.

    The first is no less than the end of any fixed item.
    """
    times = np.unique(lifetimes.starts)
    starts = np.searchsorted(times, lifetimes.starts)
    ends = np.searchsorted(times, lifetimes.ends)
    changes = np.zeros(len(times) + 1, np.int64)
    np.add.at(changes, starts, lifetimes.nbytes)
    np.subtract.at(changes, ends, lifetimes.nbytes)
    alive = np.cumsum(changes[:-1])
    tables = [alive]  # of the maxima over 1, 2, 4, ... times
    while 2 ** len(tables) <= len(times):
        last, width = tables[-1], 2 ** (len(tables) - 1)
        tables.append(np.maximum(last[:-width], last[width:]))
    levels = np.frexp((ends - starts).astype(np.float64))[1] - 1
    loads = np.array(
        [
            max(int(tables[level][start]), int(tables[level][end - 2**level]))
            for level, start, end in zip(levels, starts, ends, strict=True)
        ],
        np.int64,
    )
    bound = int(alive.max(initial=0))
    if lifetimes.fixed is not None:
        tops = np.where(lifetimes.fixed < 0, 0, lifetimes.fixed + lifetimes.nbytes)
        bound = max(bound, int(tops.max(initial=0)))
    return bound, loads


def place(lifetimes: Lifetimes, order: Order, fit: int) -> Bytes:
    """Return the offsets that placing items in an order gives.

    Args:
        lifetimes: the items.
        order: a permutation of them. Fixed items are placed before all others.
        fit: `FIRST_FIT`, the lowest gap that is large enough, or `BEST_FIT`, the smallest one.

    Raises:
        InvalidArgument: `order` is not a permutation, or fixed items overlap.
    """
    count = len(lifetimes)
    if not np.array_equal(np.sort(order), np.arange(count)):
        message = f"expected each of {count} items once in the order"
        raise InvalidArgument(message)
    placed = _Placed(lifetimes)
    if lifetimes.fixed is not None:
        for item in np.flatnonzero(lifetimes.fixed >= 0):
            placed.put_fixed(int(item), int(lifetimes.fixed[item]))
        order = order[lifetimes.fixed[order] < 0]
    for item in order:
        placed.put(int(item), placed.find(int(item), fit))
    return placed.offsets


class _Placed:
    """The items placed so far, in the order in which they were."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self.offsets = np.zeros(len(lifetimes), np.int64)
        self.count = 0
        self.starts, self.ends, self.lows, self.highs = np.empty((4, len(lifetimes)), np.int64)

    def _beside(self, item: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the offsets and ends of the placed items that live at the same time, by offset."""
        start, end = self.lifetimes.starts[item], self.lifetimes.ends[item]
        n = self.count
        beside = np.flatnonzero((self.starts[:n] < end) & (self.ends[:n] > start))
        beside = beside[np.argsort(self.lows[beside], kind="stable")]
        return self.lows[beside], self.highs[beside]

    def find(self, item: int, fit: int) -> int:
        lows, highs = self._beside(item)
        if not len(lows):
            return 0
        tops = np.maximum.accumulate(highs)
        floors = np.concatenate(([0], tops[:-1]))
        gaps = lows - floors
        fitting = np.flatnonzero(gaps >= self.lifetimes.nbytes[item])
        if not len(fitting):
            return int(tops[-1])
        chosen = fitting[np.argmin(gaps[fitting])] if fit == BEST_FIT else fitting[0]
        return int(floors[chosen])

    def put_fixed(self, item: int, offset: int) -> None:
        lows, highs = self._beside(item)
        if ((lows < offset + self.lifetimes.nbytes[item]) & (highs > offset)).any():
            message = f"item {item} overlaps another fixed item"
            raise InvalidArgument(message)
        self.put(item, offset)

    def put(self, item: int, offset: int) -> None:
        n = self.count
        self.starts[n], self.ends[n] = self.lifetimes.starts[item], self.lifetimes.ends[item]
        self.lows[n], self.highs[n] = offset, offset + self.lifetimes.nbytes[item]
        self.offsets[item] = offset
        self.count += 1


def verify(lifetimes: Lifetimes, offsets: Bytes) -> int:
    """Check a layout by a sweep over time; return its height.

    Raises:
        CorruptState: items overlap, or one is not where it must be.
    """
    if lifetimes.fixed is not None:
        moved = np.flatnonzero((lifetimes.fixed >= 0) & (lifetimes.fixed != offsets))
        if len(moved):
            message = f"layout: item {moved[0]} is not at its fixed offset"
            raise CorruptState(message)
    count = len(lifetimes)
    times = np.concatenate((lifetimes.starts, lifetimes.ends))
    is_start = np.repeat((True, False), count)
    alive: list[tuple[int, int, int]] = []  # offset, end, item; ascending, disjoint
    for event in np.lexsort((is_start, times)).tolist():
        item = event % count
        entry = (int(offsets[item]), int(offsets[item] + lifetimes.nbytes[item]), item)
        at = bisect_left(alive, entry)
        if not is_start[event]:
            del alive[at]
            continue
        for low, high, other in alive[max(at - 1, 0) : at + 1]:
            if low < entry[1] and high > entry[0]:
                message = f"layout: items {item} and {other} overlap"
                raise CorruptState(message)
        insort(alive, entry)
    return int((offsets + lifetimes.nbytes).max(initial=0))
