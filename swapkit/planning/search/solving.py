"""The search for the best actions of a problem, independent of traces and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.planning.bounds.bound import Program
from swapkit.planning.search.feasibility import find_least
from swapkit.planning.search.local_search import Effort, Search
from swapkit.planning.search.rounding import Shares
from swapkit.planning.search.trials import Trials
from swapkit.planning.search.waits import fill_waits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import HostTime
    from swapkit.planning.search.feasibility import Least
    from swapkit.planning.search.trials import Actions, Trial
    from swapkit.simulation.problems import Problem

# Memory that the linear program leaves free, in units of the largest item, because whole storages
# need more room than divisible ones.
MARGINS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
LARGE_SLOTS, FEW_MARGINS = 2000, (0.75, 1.5, 3.0)  # for large problems, which are slow to solve
HARD = 1.01  # times the bound: search a worse result twice
TIE_BREAK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """The best trial, and the lower bound of all trials of this problem."""

    trial: Trial
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFailure:
    """A budget without a plan, and the smallest budget that has one."""

    least: Least


def plan_problem(
    problem: Problem,
    machine: Machine,
    *,
    effort: Effort | None = None,
    known: Iterable[Actions] = (),
    host: HostTime | None = None,
) -> Solution | PlanFailure:
    """Return the best actions found.

    Args:
        problem: the problem; its `can_swap` and `can_recompute` limit the actions.
        machine: its budget holds at every instant.
        effort: the effort limits; None: suitable for the size of the problem.
        known: initial actions, in addition to those of the linear program.
        host: the host's time; None: the host is never the limit.
    """
    trials = Trials(problem, machine, host)
    kept = trials.simulate(trials.keep_all())
    if kept.is_possible:
        return Solution(trial=kept, bound_seconds=kept.cost)
    effort = effort or choose_effort(problem)
    program = Program(problem, machine, host=host)
    relaxation = program.solve()
    bound_seconds = math.inf if relaxation is None else relaxation.seconds
    search = Search(trials, effort, bound_seconds)
    starts = [trials.simulate(actions) for actions in known]
    if relaxation is not None:
        plain = Shares(relaxation.swapped, relaxation.recomputed)
        starts += search.find_starts([plain, *_solve_tighter(program, problem, machine)])
    if not any(start.is_possible for start in starts):
        least = find_least(problem, machine)
        if least.budget_bytes > machine.budget_bytes:
            return PlanFailure(least=least)
        starts.append(trials.simulate(least.trial.actions))
    best = search.improve(starts)
    if best.cost > bound_seconds * HARD:  # chance matters more for hard problems
        best = search.improve([best, *starts])
    best = fill_waits(trials, search.drop_needless(best))
    return Solution(trial=best, bound_seconds=bound_seconds)


def choose_effort(problem: Problem, *, part: int = 1) -> Effort:
    """Return the suitable effort: about the same time for all problems, except very large ones.

    `part`: divides it.
    """
    size = len(problem.slot_seconds) + len(problem.item_bytes)
    starts = min(max(400_000 // size, 80), 800)
    return Effort(starts=starts // part, changes=min(max(10_000_000 // size, 1500), 7000) // part)


def _solve_tighter(program: Program, problem: Problem, machine: Machine) -> list[Shares]:
    """Return solutions for slightly smaller budgets, until one has no solution."""
    largest = int(problem.item_bytes.max(initial=0))
    is_large = len(problem.slot_seconds) > LARGE_SLOTS
    solutions = []
    for margin in FEW_MARGINS if is_large else MARGINS:
        relaxation = program.solve(
            machine.budget_bytes - int(margin * largest), tie_break=TIE_BREAK
        )
        if relaxation is None:
            break
        solutions.append(Shares(relaxation.swapped, relaxation.recomputed))
    return solutions
