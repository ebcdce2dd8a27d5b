"""A local search that turns solutions of the linear program into a schedule.

Whole storages fit worse than parts of them. So the search solves the program for several budgets,
each a little smaller, and rounds the shares in many ways. Small changes then improve the best
results: many results briefly at first, then the best of them for longer. The effort is counted in
simulations, so the result does not depend on the machine's speed; the clock is only a last resort.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swapkit.planning.search.moves import Moves, Rounder, Shares, Trial, Trials
from swapkit.simulation.timeline import KEEP

# Rounds of improvement: number of trials that continue, and their share of all simulations.
ROUNDS = ((16, 0.3), (6, 0.3), (2, 0.2), (1, 0.2))
STARTS_OF_A_MARGIN = 2
HEAT = 1e-4  # share of the bound: initial tolerance for worse changes, to leave local optima
GOOD_ENOUGH = 1.0005  # times the bound: the search stops
WINDOWS = (64, 32, 16)  # most slots before its need that a copy back may start, besides no limit
NOTHING = 1e-5  # share of the step's time: too little to justify a move
JITTER = 0.4  # of an item: random offset of a class's sums when they are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The effort limits of a search."""

    starts: int  # rounded solutions
    changes: int
    seconds: float = 60.0  # time limit, in case simulations are unexpectedly slow
    seed: int = 0


class Search:
    """A search for the best trial of one problem."""

    def __init__(self, trials: Trials, effort: Effort, bound_seconds: float) -> None:
        """Prepare to search.

        Args:
            trials: the simulator of the problem.
            effort: the effort limits.
            bound_seconds: lower bound of all trials.
        """
        self._trials = trials
        self._effort = effort
        self._bound = bound_seconds
        self._random = random.Random(effort.seed)
        self._moves = Moves(trials.problem, trials.machine, self._random)
        self._rounder = Rounder(trials.problem, trials.machine)
        self._ends_at = time.monotonic() + effort.seconds

    def find_starts(self, solutions: Sequence[Shares]) -> list[Trial]:
        """Return the best rounded solutions, some for each solution and between each two.

        Stop at one that is as good as the bound.
        """
        blends = list(_blend(solutions))
        each = max(1, self._effort.starts // max(1, len(blends)))
        found: list[Trial] = []
        for low, high, part in blends:
            unlike: dict[bytes, Trial] = {}
            for trial in self._round(low, high, part, each):
                if self._is_done(trial):
                    return [trial]
                known = unlike.setdefault(trial.actions.tobytes(), trial)
                if trial.cost < known.cost:
                    unlike[trial.actions.tobytes()] = trial
            found += sorted(unlike.values(), key=_cost)[:STARTS_OF_A_MARGIN]
        return sorted(found, key=_cost)

    def improve(self, starts: Iterable[Trial]) -> Trial:
        """Return the best trial that changes to the starts lead to."""
        found = sorted(starts, key=_cost)
        pool = [trial.actions for trial in found]
        is_done = self._bound < math.inf and self._is_done(found[0])
        for count, share in () if is_done else ROUNDS:
            found = found[:count]
            each = max(1, int(self._effort.changes * share / len(found)))
            self._moves.learn([trial.actions for trial in found] + pool)
            found = sorted((self._descend(trial, each) for trial in found), key=_cost)
            if self._is_done(found[0]):
                break
        return min((found[0], *self._try_windows(found[0])), key=_cost)

    def drop_needless(self, trial: Trial) -> Trial:
        """Return an equally good trial that keeps every item that need not move."""
        moved = np.flatnonzero(trial.actions != KEEP)
        limit = trial.cost * (1 + NOTHING)
        # Start with items used soonest: if kept, they occupy memory for the shortest time.
        order = moved[np.argsort(self._trials.problem.uses[moved], kind="stable")]
        parts = [order]
        while parts:
            part = parts.pop()
            if not len(part):
                continue
            actions = trial.actions.copy()
            actions[part] = KEEP
            kept = self._trials.simulate(actions, trial.window)
            if kept.cost <= limit:
                trial = kept
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return trial

    def _round(self, low: Shares, high: Shares, part: float, count: int) -> Iterator[Trial]:
        rounder, draw = self._rounder, self._random
        plain = low.blend(high, part)
        still = [(0.0, 0.0)] * rounder.nclasses
        for actions in (rounder.diffuse(plain, still), rounder.take_first(plain)):
            yield self._trials.simulate(actions)
            for window in WINDOWS:
                yield self._trials.simulate(actions, window)
        for _ in range(count):
            near = min(max(part + draw.uniform(-0.25, 0.25), 0.0), 1.0)
            phases = [(draw.uniform(-JITTER, JITTER), draw.uniform(-JITTER, JITTER)) for _ in still]
            ahead = draw.choice((None, None, None, *WINDOWS))
            yield self._trials.simulate(rounder.diffuse(low.blend(high, near), phases), ahead)

    def _descend(self, start: Trial, count: int) -> Trial:
        """Change a trial `count` times; accept worse trials sometimes, less and less often."""
        best = current = start
        for index in range(count if self._moves.items else 0):
            actions = self._moves.propose(current)
            if actions is None:
                continue
            trial = self._trials.simulate(actions, start.window)
            if self._accepts(trial.cost - current.cost, 1 - index / count):
                current = trial
            if trial.cost < best.cost:
                best = trial
                if self._is_done(best):
                    break
            if index % 64 == 0 and time.monotonic() > self._ends_at:
                break
        return best

    def _accepts(self, worse: float, warmth: float) -> bool:
        """Return whether to accept a trial `worse` seconds slower; `warmth` goes from 1 to 0."""
        if worse <= 0:
            return True
        chance = -worse / (HEAT * self._bound * warmth)
        return chance > -10 and self._random.random() < math.exp(chance)

    def _try_windows(self, trial: Trial) -> Iterator[Trial]:
        for window in (None, *WINDOWS):
            yield self._trials.simulate(trial.actions, window)

    def _is_done(self, trial: Trial) -> bool:
        return trial.cost <= self._bound * GOOD_ENOUGH


def _blend(solutions: Sequence[Shares]) -> Iterator[tuple[Shares, Shares, float]]:
    """Yield each solution, and the midpoint of each two neighbours."""
    for low, high in pairwise(solutions):
        yield low, high, 0.0
        yield low, high, 0.5
    if solutions:
        yield solutions[-1], solutions[-1], 0.0


def _cost(trial: Trial) -> float:
    return trial.cost
