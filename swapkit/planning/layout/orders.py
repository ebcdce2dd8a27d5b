"""Orders in which to place items.

The first ones suit traces of training best: what lives alike lies side by side. Where lifetimes are
nested or disjoint, as in a plain forward and backward pass, the longest first is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swapkit._native.layout import BEST_FIT, FIRST_FIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from swapkit.planning.layout.values import Lifetimes, Order, Times

CRITICAL_SHARE = 0.03  # of the bound: loads closer than this are alike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measures:
    """The values that orders sort by. `lives` and `starts` count starts and ends, not time."""

    starts: Times
    lives: Times
    nbytes: NDArray[np.int64]
    slack: Times  # bytes below the bound at the fullest moment of a life, in steps

    @classmethod
    def of(cls, lifetimes: Lifetimes, bound: int, loads: NDArray[np.int64]) -> Measures:
        """Measure items; `loads` are the most bytes alive during each one's life."""
        times = np.unique(np.concatenate((lifetimes.starts, lifetimes.ends)))
        starts = np.searchsorted(times, lifetimes.starts)
        ends = np.searchsorted(times, lifetimes.ends)
        step = int(bound * CRITICAL_SHARE) + 1
        return cls(
            starts=starts,
            lives=ends - starts,
            nbytes=lifetimes.nbytes,
            slack=(bound - loads) // step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRule:
    """One placement to try."""

    name: str
    keys: Callable[[Measures], tuple[NDArray[np.int64], ...]]  # the most important first
    fit: int = FIRST_FIT

    def order(self, measures: Measures) -> Order:
        """Return the items in the order to place them; equal ones by their number."""
        return np.lexsort(self.keys(measures)[::-1]).astype(np.int32)


def _log(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the power of two at or below each value above 0."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


PLACEMENTS = (
    PlacementRule(name="life class, size", keys=lambda m: (-_log(m.lives), -m.nbytes, m.starts)),
    PlacementRule(name="size, life", keys=lambda m: (-m.nbytes, -m.lives)),
    PlacementRule(
        name="load, life class, size",
        keys=lambda m: (m.slack, -_log(m.lives), -m.nbytes, m.starts),
    ),
    PlacementRule(name="wide life class, start", keys=lambda m: (-(_log(m.lives) // 3), m.starts)),
    PlacementRule(name="life", keys=lambda m: (-m.lives, -m.nbytes)),
    PlacementRule(name="size class, start", keys=lambda m: (-_log(m.nbytes), m.starts, -m.lives)),
    PlacementRule(name="size, start", keys=lambda m: (-m.nbytes, m.starts)),
    PlacementRule(name="life, best fit", keys=lambda m: (-m.lives, -m.nbytes), fit=BEST_FIT),
)
SIZE_FIRST = PLACEMENTS[1]
