"""Recomputing while the step waits for other ranks, instead of right before the need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swapkit.planning.search.moves import Trial, Trials
from swapkit.simulation.items import count_fitting, find_levels
from swapkit.simulation.problems import Bytes
from swapkit.simulation.timeline import RECOMPUTE

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
    levels = find_levels(problem, best.run, best.actions, at_needs=True)
    for slot in sorted(longest.tolist(), reverse=True):
        chosen = _choose(trials, best, levels, recomputed[earlies[recomputed] < 0], slot)
        if not chosen:
            continue
        asked = earlies.copy()
        asked[chosen] = slot
        tried = trials.simulate(best.actions, best.window, earlies=asked)
        if tried.cost < best.cost:
            best, earlies = tried, asked
            levels = find_levels(problem, best.run, best.actions, at_needs=True)
    return best


def _choose(
    trials: Trials, trial: Trial, levels: Bytes, items: NDArray[np.int64], slot: int
) -> list[int]:
    """Return the items to recompute before a slot that waits. `levels`: of the trial."""
    problem, needs = trials.problem, trial.run.needs
    later = items[(problem.releases[items] < slot) & (needs[items] > slot)]
    in_order = later[np.lexsort((problem.births[later], needs[later]))]
    end = int(needs[in_order[-1]]) if len(in_order) else slot
    fitting = count_fitting(
        problem,
        needs[in_order] - slot,
        in_order,
        levels[slot:end].copy(),
        trials.machine.budget_bytes,
    )
    chosen: list[int] = in_order[:fitting].tolist()
    left, ran = float(problem.slot_seconds[slot]), set[int]()
    for count, item in enumerate(chosen):
        steps = set(problem.steps_of(item)) - ran
        left -= sum(float(problem.step_seconds[step]) for step in steps)
        if left < 0:
            return chosen[:count]
        ran |= steps
    return chosen
