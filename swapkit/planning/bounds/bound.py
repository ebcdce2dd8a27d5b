"""The lower bound for all plans. fluid.py has the linear program and explains the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from swapkit.ir.machines import Machine
from swapkit.ir.traces import HostTime
from swapkit.planning.bounds.fluid import FluidBuilder, find_alive_bytes
from swapkit.planning.bounds.linear import Solver
from swapkit.planning.bounds.windows import find_windows
from swapkit.simulation.problems import Flags, Floats, Problem

# ---- closed form ---------------------------------------------------------------------------------
#
# A weaker bound without a solver.
#
# At a boundary k where too many bytes are alive, the excess V must be gone: h bytes are swapped,
# the others are recomputed later. Before k, the link moves at most the bytes that computing hides,
# and more only in stalls or during recomputing. The same is true for copies back after k. Let R(v)
# be the seconds to recompute v bytes of the items that are idle at k, cheapest items first. Then
#
#   added seconds >= min over h of A(h) + max(B(h), R(V - h))
#   A(h) = max(0, h - hidden before k) * seconds per byte out,  B(h): the same after k, and back
#
# because items gone at k are recomputed after k, which may hide copies back, but not copies out.
# Clean items count as gone at no cost.

_PEAKS = 16  # number of boundaries to examine, those with the most bytes alive


def closed_form_bound(problem: Problem, machine: Machine) -> float:
    """Return a lower bound of the seconds of any schedule; math.inf: none fits the budget."""
    seconds = _find_seconds(problem)
    excess = find_alive_bytes(problem) - machine.budget_bytes
    peaks = [int(k) for k in np.argsort(-excess, kind="stable")[:_PEAKS] if excess[k] > 0]
    added = [_Boundary(problem, machine, seconds, k).added_seconds(excess[k]) for k in peaks]
    least = max(0.0, max(added, default=0.0) - problem.wait_seconds())  # see bound.py
    return float(np.sum(problem.slot_seconds)) + least


def _find_seconds(problem: Problem) -> Floats:
    """Return the recompute time of each item, with shared steps divided evenly."""
    windows = find_windows(problem, problem.can_recompute)
    seconds = windows.own_seconds.copy()
    for group in windows.shared:
        seconds[list(group.items)] += group.seconds / len(group.items)
    return np.where(problem.can_recompute, seconds, 0.0)


class _Boundary:
    """The start of slot k, and the items that are idle there."""

    def __init__(self, problem: Problem, machine: Machine, seconds: Floats, k: int) -> None:
        self._problem = problem
        self._machine = machine
        self._slot = k
        gone = (problem.releases < k) & (k < problem.uses)
        gone |= (problem.tails >= 0) & (problem.tails <= k)
        # Weights that go on have left in the step before.
        is_clean = ~problem.is_copied | (problem.tails >= 0)
        idle = gone & ~is_clean
        clean = gone & is_clean & problem.can_swap
        self._clean_bytes = float(np.sum(problem.item_bytes[clean]))
        remade = idle & problem.can_recompute
        order = np.argsort(seconds[remade] / problem.item_bytes[remade], kind="stable")
        self._bytes = np.concatenate(([0.0], np.cumsum(problem.item_bytes[remade][order])))
        self._costs = np.concatenate(([0.0], np.cumsum(seconds[remade][order])))
        self._swappable = self._find_swappable(idle & problem.can_swap)

    def added_seconds(self, excess: float) -> float:
        """Return a lower bound of the seconds added to the step."""
        excess = max(0.0, excess - self._clean_bytes)
        most = min(excess, self._swappable)
        least = max(0.0, excess - self._bytes[-1])
        if least > most:
            return math.inf
        corners = np.concatenate((excess - self._bytes, self._hidden, (least, most)))
        corners = np.unique(np.clip(corners, least, most))
        out, back, remade = self._price(corners, excess)
        # Between corners all three are linear: the best is at a corner, or where the max changes.
        gaps = remade - back
        changes = np.flatnonzero(gaps[:-1] * gaps[1:] < 0)
        shares = gaps[changes] / (gaps[changes] - gaps[changes + 1])
        crossings = corners[changes] + shares * (corners[changes + 1] - corners[changes])
        out, back, remade = self._price(np.concatenate((corners, crossings)), excess)
        return float(np.min(out + np.maximum(back, remade)))

    def _price(self, swapped: Floats, excess: float) -> tuple[Floats, Floats, Floats]:
        """Return the unhidden seconds out and back, and the seconds to recompute the rest."""
        out = np.maximum(0.0, swapped - self._hidden[0]) * self._paces[0]
        back = np.maximum(0.0, swapped - self._hidden[1]) * self._paces[1]
        return out, back, np.interp(excess - swapped, self._bytes, self._costs)

    def _find_swappable(self, items: Flags) -> float:
        """Return the most bytes that may be swapped; store the bytes hidden out and back."""
        problem, machine, k = self._problem, self._machine, self._slot
        sizes = problem.item_bytes.astype(np.float64)
        # The largest copy takes the least time per byte.
        largest = float(np.max(sizes[problem.can_swap], initial=1.0))
        self._paces = (
            machine.out_latency_seconds / largest + 1.0 / machine.out_bytes_per_second,
            machine.in_latency_seconds / largest + 1.0 / machine.in_bytes_per_second,
        )
        count = len(problem.slot_seconds)
        times = np.concatenate(([0.0], np.cumsum(problem.slot_seconds)))[:count]
        # Before slot i, at most all final bytes can leave; after it, the link is the limit.
        final = np.bincount(problem.readies[items] + 1, sizes[items], count)
        before = np.cumsum(final)[: k + 1] - final[: k + 1]
        needed = np.bincount(problem.uses[items], sizes[items], count)
        after = (np.sum(needed) - np.cumsum(needed))[k:]
        self._hidden = (
            float(np.min(before + (times[k] - times[: k + 1]) / self._paces[0])),
            float(np.min(after + (times[k:] - times[k]) / self._paces[1])),
        )
        total = float(np.sum(sizes[items]))
        if machine.host_bytes is None:
            return total
        return min(total, float(machine.host_bytes + machine.disk_bytes))


# ---- bound ---------------------------------------------------------------------------------------
#
# The lower bound for all plans. fluid.py has the linear program and explains the bound.
#
# The linear program and the closed form let waits for other ranks take as long as if nothing were
# moved. In a run, what is moved may shorten them, by no more than all of their time.

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
