"""The optimal actions for small problems, as a reference for faster planners."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import highspy
import numpy as np

from swapkit.planning.bounds.bound import Program, lower_bound
from swapkit.planning.bounds.linear import SilentHighs
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK, run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from swapkit.ir.machines import Machine
    from swapkit.planning.bounds.bound import Relaxation
    from swapkit.planning.bounds.linear import Linear
    from swapkit.simulation.problems import Floats, Indexes, Problem

    Actions: TypeAlias = NDArray[np.int8]

_KINDS = (RECOMPUTE, SWAP, SWAP_TO_DISK)  # in the order of the program's shares
GAP = 1e-4  # of the step
_TOLERANCE = 1e-6  # feasibility tolerance of HiGHS
# Storages move as a whole and need more room than the program assumes. Margins to try, in units of
# the largest item.
_MARGINS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """The best actions found, with their simulated time and the lower bound of all schedules.

    `seconds` is math.inf if no tried actions ran, `bound_seconds` if none can run.
    """

    seconds: float
    bound_seconds: float
    actions: Actions
    is_proven: bool = False  # no other actions, simulated, take less


def solve_exact(problem: Problem, machine: Machine, *, time_limit_s: float = 60.0) -> Exact:
    """Return the best actions; practical for up to about ten items.

    First, solve the program of bound.py with whole items. That program still moves bytes evenly, so
    simulate its solutions for the budget and for smaller ones, and take the best. Then try all
    other actions, or exclude them by the program's bound, until the time is up.
    """
    deadline = time.monotonic() + time_limit_s
    bound = lower_bound(problem, machine)
    best = Exact(
        seconds=math.inf,
        bound_seconds=bound,
        actions=np.full(len(problem.item_bytes), KEEP, np.int8),
    )
    if math.isinf(bound):
        return replace(best, is_proven=True)
    largest = float(np.max(problem.item_bytes, initial=0))
    for margin in _MARGINS:
        left = deadline - time.monotonic()
        if left <= 0 or best.seconds <= best.bound_seconds * (1 + GAP):
            break
        budget = machine.budget_bytes - margin * largest
        seconds, actions = _branch(problem, machine, budget, left)
        if margin == 0.0:
            best = replace(best, bound_seconds=max(bound, seconds))
        if actions is None:
            break
        simulated = run(problem, machine, actions).seconds
        if simulated < best.seconds:
            best = replace(best, seconds=simulated, actions=actions)
    return _ExactSearch(problem, machine, deadline).improve(best)


class WholeProgram(Program):
    """A bound whose items can be decided, one by one."""

    def fix(self, item: int, shares: Iterable[float] | None) -> None:
        """Fix the shares of an item from now on.

        Args:
            item: number of the item.
            shares: recomputed, swapped to the host, and to disk, as far as the program has these
                tiers. None: decide freely again.
        """
        linear = self.fluid.linear
        tiers = (tier.shares for tier in self.fluid.tiers)
        columns = np.array([shares_of[item] for shares_of in (self.fluid.recomputed, *tiers)])
        least, most = linear.lowers[columns], linear.uppers[columns]
        if shares is not None:
            least = most = np.array(list(shares), dtype=np.float64)[: len(columns)]
        self._lowers[columns], self._ends[columns] = least, most
        self._solver.set_bounds(columns, least, most)

    def within(self, budget_bytes: float) -> Linear | None:
        """Return the linear program for a budget; None: the budget is too small."""
        lowers = self._find_lowers(budget_bytes)
        if lowers is None:
            return None
        all_lowers = self.fluid.linear.lowers.copy()
        all_lowers[self.fluid.freed] = lowers
        return replace(self.fluid.linear, lowers=all_lowers)


class _ExactSearch:
    """A branch and bound over all actions, one item at a time."""

    def __init__(self, problem: Problem, machine: Machine, deadline: float) -> None:
        self._problem = problem
        self._machine = machine
        self._deadline = deadline
        self._program = WholeProgram(problem, machine)
        self._tiers = len(self._program.fluid.tiers)
        # Start with the most important items: large ones with long gaps.
        spans = problem.item_bytes * (problem.uses - problem.releases).astype(np.float64)
        self._order = np.argsort(-spans, kind="stable").tolist()
        self._actions = np.full(len(problem.item_bytes), KEEP, np.int8)

    def improve(self, best: Exact) -> Exact:
        """Return the best of all actions, or of all that were tried before the deadline."""
        self._best = best
        finished = self._visit(0)
        return replace(self._best, is_proven=finished)

    def _visit(self, depth: int) -> bool:
        """Try all actions of the undecided items; return whether there was enough time."""
        if time.monotonic() > self._deadline:
            return False
        relaxation = self._program.solve()
        if relaxation is None or relaxation.seconds >= self._best.seconds:
            return True
        if depth == len(self._order):
            seconds = run(self._problem, self._machine, self._actions).seconds
            if seconds < self._best.seconds:
                self._best = replace(self._best, seconds=seconds, actions=self._actions.copy())
            return True
        item = self._order[depth]
        for action in self._choices(item, relaxation):
            self._program.fix(item, [float(action == kind) for kind in _KINDS])
            self._actions[item] = action
            if not self._visit(depth + 1):
                return False
        self._program.fix(item, None)
        return True

    def _choices(self, item: int, relaxation: Relaxation) -> list[int]:
        """Return the possible actions of an item, in the order of their shares in the program."""
        swapped, recomputed = relaxation.swapped[item], relaxation.recomputed[item]
        stored = 0.0 if relaxation.on_disk is None else relaxation.on_disk[item]
        wishes = {KEEP: 1.0 - swapped - recomputed}
        if self._problem.can_recompute[item]:
            wishes[RECOMPUTE] = recomputed
        if self._problem.can_swap[item]:
            wishes[SWAP] = swapped - stored
            if self._tiers > 1 and not self._problem.is_weight[item]:
                wishes[SWAP_TO_DISK] = stored
        return sorted(wishes, key=lambda action: -wishes[action])


def _branch(
    problem: Problem, machine: Machine, budget_bytes: float, time_limit_s: float
) -> tuple[float, Actions | None]:
    """Return the lower bound of all whole actions within a budget, and the best ones found."""
    program = WholeProgram(problem, machine)
    linear = program.within(budget_bytes)
    if linear is None:
        return math.inf, None
    fluid = program.fluid
    shares = [fluid.recomputed, *(tier.shares for tier in fluid.tiers)]
    plain = float(np.sum(problem.slot_seconds))
    found = solve_integral(
        linear,
        np.concatenate(shares),
        offset=plain / fluid.unit_seconds,
        gap=GAP,
        time_limit_s=time_limit_s,
    )
    added = max(0.0, found.bound - _TOLERANCE) * fluid.unit_seconds
    bound = plain + max(0.0, added - problem.wait_seconds())  # see bound.py
    if found.values is None:
        return bound, None
    actions = np.full(len(problem.item_bytes), KEEP, np.int8)
    for kind, columns in zip(_KINDS, shares, strict=False):
        actions[_is_whole(found.values[columns])] = kind
    return bound, actions


def _is_whole(shares: Floats) -> NDArray[np.bool_]:
    whole: NDArray[np.bool_] = shares > 0.5
    return whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Integral:
    """The best solution with integral variables, and its bound. `values` None: none was found."""

    values: Floats | None
    bound: float  # no integral solution costs less; math.inf: there is none


def solve_integral(
    linear: Linear, columns: Indexes, *, offset: float, gap: float, time_limit_s: float
) -> Integral:
    """Solve with integral `columns` until the best is within `gap` of the bound, or time is up.

    `offset` is added to the total cost; it matters because `gap` is relative to that total.
    """
    model = linear.to_highs()
    kinds = np.full(len(linear.costs), highspy.HighsVarType.kContinuous)
    kinds[columns] = highspy.HighsVarType.kInteger
    model.integrality_ = kinds.tolist()
    model.offset_ = offset
    highs = SilentHighs()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("time_limit", time_limit_s)
    # HiGHS 1.15 may crash when it starts over with fewer columns.
    highs.setOptionValue("mip_allow_restart", False)
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return Integral(values=None, bound=np.inf)
    info = highs.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(highs.getSolution().col_value) if found else None
    return Integral(values=values, bound=info.mip_dual_bound - offset)
