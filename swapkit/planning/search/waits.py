"""Recomputing while the step waits for other ranks, instead of right before the need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swapkit.simulation.levels import find_levels
from swapkit.simulation.timeline import RECOMPUTE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swapkit.planning.search.trials import Trial, Trials

MOST_WAITS = 128  # the longest; each takes a simulation


def fill_waits(trials: Trials, best: Trial) -> Trial:
    """Return a trial that recomputes in waits as far as that makes its step shorter.

    Each wait, the last one first, takes the storages that are needed next after it, as many as it
    has time and the budget has room for.
    """
    problem = trials.problem
    recomputed = np.flatnonzero(best.actions == RECOMPUTE)
    if not len(problem.waits) or not len(recomputed):
        return best
    seconds = problem.slot_seconds[problem.waits]
    longest = problem.waits[np.argsort(-seconds, kind="stable")[:MOST_WAITS]]
    earlies = np.full(len(best.actions), -1, np.int32)
    for slot in sorted(longest.tolist(), reverse=True):
        chosen = _choose(trials, best, recomputed[earlies[recomputed] < 0], slot)
        if not chosen:
            continue
        asked = earlies.copy()
        asked[chosen] = slot
        tried = trials.simulate(best.actions, best.window, earlies=asked)
        if tried.cost < best.cost:
            best, earlies = tried, asked
    return best


def _choose(trials: Trials, trial: Trial, items: NDArray[np.int64], slot: int) -> list[int]:
    """Return the items to recompute before a slot that waits."""
    problem, needs = trials.problem, trial.run.needs
    later = items[(problem.releases[items] < slot) & (needs[items] > slot)]
    in_order = later[np.lexsort((problem.births[later], needs[later]))]
    levels = find_levels(problem, trial.run, trial.actions, at_needs=True)
    budget_bytes = trials.machine.budget_bytes
    left, ran, chosen = float(problem.slot_seconds[slot]), set[int](), list[int]()
    for item in in_order.tolist():
        steps = set(problem.steps_of(item)) - ran
        left -= sum(float(problem.step_seconds[step]) for step in steps)
        levels[slot : needs[item]] += problem.item_bytes[item]
        most = max(
            int(levels[slot : needs[item]].max()), int(levels[slot] + problem.chain_bytes[item])
        )
        if left < 0 or most > budget_bytes:
            break
        ran |= steps
        chosen.append(item)
    return chosen
