"""The bytes in use in each slot of a simulated step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swapkit.simulation.running import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swapkit.simulation.problems import Bytes, Indexes, Problem
    from swapkit.simulation.running import Run


def find_levels(
    problem: Problem, run: Run, actions: NDArray[np.int8], *, at_needs: bool = False
) -> Bytes:
    """Return the bytes in use in each slot: the most at any time in it.

    `at_needs`: as if copies back took their memory only in the slot that needs it.
    """
    slots = len(problem.slot_seconds)
    changes = np.zeros(slots + 1, np.int64)

    def add(firsts: Indexes, lasts: Indexes, nbytes: Bytes) -> None:
        are_there = firsts <= lasts
        np.add.at(changes, firsts[are_there], nbytes[are_there])
        np.subtract.at(changes, lasts[are_there] + 1, nbytes[are_there])

    births, deaths, sizes = problem.births, problem.deaths, problem.item_bytes
    kept = actions == KEEP
    add(births[kept], deaths[kept], sizes[kept])
    again = actions == RECOMPUTE
    add(births[again], problem.releases[again], sizes[again])
    add(run.needs[again], deaths[again], sizes[again])
    add(run.needs[again], run.needs[again], problem.chain_bytes[again])
    swapped = (actions == SWAP) | (actions == SWAP_TO_DISK)
    left = np.searchsorted(run.slot_starts, run.released[swapped], side="left") - 1
    back = run.needs[swapped]
    if not at_needs:
        started = np.searchsorted(run.slot_ends, run.in_starts[swapped], side="right")
        back = np.minimum(started, back)
    add(births[swapped], np.minimum(left, back - 1), sizes[swapped])
    add(back, deaths[swapped], sizes[swapped])
    levels: Bytes = problem.slot_bytes + np.cumsum(changes[:-1])
    return levels


def count_fitting(
    problem: Problem, needs: Indexes, items: NDArray[np.int64], levels: Bytes, budget_bytes: int
) -> int:
    """Return how many items, from the first, can be made ahead of their needs, before a slot.

    Args:
        problem: the step.
        needs: the slot before which each item is needed, counted from that one.
        items: the items.
        levels: the bytes in use from that slot on; overwritten.
        budget_bytes: limit.
    """
    for count, (need, item) in enumerate(zip(needs.tolist(), items.tolist(), strict=True)):
        levels[:need] += problem.item_bytes[item]
        most = max(int(levels.max()), int(levels[0] + problem.chain_bytes[item]))
        if need and most > budget_bytes:
            return count
    return len(items)
