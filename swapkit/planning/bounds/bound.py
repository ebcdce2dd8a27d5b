"""The lower bound for all plans. fluid.py has the linear program and explains the bound.

The linear program and the closed form let waits for other ranks take as long as if nothing were
moved. In a run, what is moved may shorten them, by no more than all of their time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swapkit.planning.bounds.closed_form import closed_form_bound
from swapkit.planning.bounds.fluid import FluidBuilder
from swapkit.planning.bounds.linear import Solver

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import HostTime
    from swapkit.simulation.problems import Floats, Problem

_SLACK = 10.0  # upper limit of a single stall, in optima


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxation:
    """The best shares of the items to swap and to recompute, from 0 to 1.

    No schedule takes less than `seconds`, unless the program was solved with a tie break.
    """

    seconds: float
    swapped: Floats
    recomputed: Floats
    on_disk: Floats | None = None  # the part of `swapped` on disk; None: the disk does not help


class Program:
    """A bound for one problem. Solving for another budget starts from the last solution."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        *,
        can_swap: bool = True,
        can_recompute: bool = True,
        host: HostTime | None = None,
    ) -> None:
        self._problem = problem
        self._machine = machine
        self.fluid = FluidBuilder(
            problem, machine, problem.can_swap & can_swap, problem.can_recompute & can_recompute
        ).build(host)
        self._items, self._slots = len(problem.item_bytes), len(problem.slot_seconds)
        self._plain_seconds = float(np.sum(problem.slot_seconds))
        self._wait_seconds = problem.wait_seconds()
        self._solver = Solver(self.fluid.linear, self.fluid.basis)
        self._tie_break = 0.0
        self._lowers, self._ends = self.fluid.linear.lowers.copy(), self.fluid.ends.copy()

    def solve(
        self, budget_bytes: float | None = None, *, tie_break: float = 0.0
    ) -> Relaxation | None:
        """Return the best solution within a budget (None: the machine's); None: there is none.

        With `tie_break`, such as 1e-6, prefer the equally good solution that swaps less, and that
        swaps items that are born early; `seconds` is then its time, not a strict bound.
        """
        fluid = self.fluid
        budget = self._machine.budget_bytes if budget_bytes is None else budget_bytes
        lowers = self._find_lowers(budget)
        if lowers is None:
            return None
        self._solver.set_bounds(fluid.freed, lowers, np.full(len(lowers), np.inf))
        self._set_tie_break(tie_break)
        solution = self._solver.solve()
        if solution is None:
            return None
        values, duals = solution
        shares = np.clip(values, 0.0, 1.0)
        return Relaxation(
            seconds=self._measure(values) if tie_break else self._bound(values, duals, lowers),
            swapped=sum((shares[tier.shares] for tier in fluid.tiers), np.zeros(self._items)),
            recomputed=shares[fluid.recomputed],
            on_disk=shares[fluid.tiers[-1].shares] if len(fluid.tiers) > 1 else None,
        )

    def _find_lowers(self, budget_bytes: float) -> Floats | None:
        """Return the units to free at each boundary; None: more than can be freed."""
        fluid = self.fluid
        lowers = fluid.alive - budget_bytes / fluid.unit_bytes
        lowers = np.tile(lowers, len(fluid.freed) // self._slots)
        return None if np.any(lowers > fluid.ends[fluid.freed]) else lowers

    def _set_tie_break(self, tie_break: float) -> None:
        if tie_break == self._tie_break:
            return
        self._tie_break = tie_break
        fluid = self.fluid
        sizes = self._problem.item_bytes / fluid.unit_bytes
        costs = tie_break * sizes * (0.5 + self._problem.births / self._slots)
        for tier in fluid.tiers:
            self._solver.set_costs(tier.shares, costs)

    def _measure(self, values: Floats) -> float:
        added = float(self.fluid.linear.costs @ values)
        return self._plain_seconds + added * self.fluid.unit_seconds

    def _bound(self, values: Floats, duals: Floats, least_freed: Floats) -> float:
        """Return the bound of the duals, which is valid even if the solver stopped a bit early."""
        linear, fluid = self.fluid.linear, self.fluid
        lowers, ends = self._lowers.copy(), self._ends.copy()
        lowers[fluid.freed] = np.maximum(least_freed, -4.0 * ends[fluid.freed])
        # A schedule with a longer stall takes longer than the optimum, so it does not matter.
        longest = _SLACK * max(float(linear.costs @ values), 1.0)
        ends[fluid.stalls] = longest
        added = min(max(linear.bound(duals, lowers, ends), 0.0), longest)
        return self._plain_seconds + max(0.0, added * fluid.unit_seconds - self._wait_seconds)


def lower_bound(problem: Problem, machine: Machine) -> float:
    """Return a lower bound of the seconds of any schedule of the problem on the machine.

    math.inf: no schedule fits the budget.
    """
    relaxation = Program(problem, machine).solve()
    if relaxation is None:
        return math.inf
    # The closed form accounts for one rule that the linear program ignores: an item is freed only
    # after it was both copied out and released. Otherwise the closed form is weaker.
    return max(relaxation.seconds, closed_form_bound(problem, machine))
