"""Recomputing in the bubble before a backward, instead of within it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from swapkit.simulation.items import count_fitting, find_levels
from swapkit.simulation.running import RECOMPUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from swapkit.simulation.problems import Problem
    from swapkit.simulation.running import Run


def find_early(
    problem: Problem,
    run: Run,
    actions: NDArray[np.int8],
    bounds: Sequence[int],
    budget_bytes: int,
) -> list[float]:
    """Return for each job the seconds of recomputing that can move to the bubble before it.

    There the recomputed storages are in memory from the start of the job on, not only from their
    need. The first of them move, in the order of need, as many as the budget allows.

    Args:
        problem: the step of a stage.
        run: its run.
        actions: the action of each item.
        bounds: the first operator of each job, the bubble before it included; then the end.
        budget_bytes: limit of the bytes in use.
    """
    levels = find_levels(problem, run, actions)
    recomputed = np.flatnonzero(actions == RECOMPUTE)
    order = recomputed[np.lexsort((problem.births[recomputed], run.needs[recomputed]))]
    firsts = problem.slot_operators[:-1]
    early = []
    for first, after in pairwise(bounds):
        begin = int(np.searchsorted(firsts, first, side="right")) - 1
        end = int(np.searchsorted(firsts, after, side="left"))
        items = order[(run.needs[order] >= begin) & (run.needs[order] < end)]
        own = levels[begin:end].copy()
        fitting = count_fitting(problem, run.needs[items] - begin, items, own, budget_bytes)
        early.append(_sum_steps(problem, run, items[:fitting]))
    return early


def _sum_steps(problem: Problem, run: Run, items: NDArray[np.int64]) -> float:
    """Return the seconds of the steps that recompute some items; each runs once for a slot."""
    ran = {
        (int(run.needs[item]), step) for item in items.tolist() for step in problem.steps_of(item)
    }
    return sum(float(problem.step_seconds[step]) for _, step in sorted(ran))
