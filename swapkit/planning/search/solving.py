"""The best actions for a problem: nothing here knows of traces and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.planning.bounds.bound import Program
from swapkit.planning.search.feasibility import find_least
from swapkit.planning.search.local_search import Effort, Search
from swapkit.planning.search.rounding import Shares
from swapkit.planning.search.trials import Trials

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import HostTime
    from swapkit.planning.search.feasibility import Least
    from swapkit.planning.search.trials import Actions, Trial
    from swapkit.simulation.problems import Problem

# Memory that the linear program leaves free, in largest items: what whole storages need more.
MARGINS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
LARGE_SLOTS, FEW_MARGINS = 2000, (0.75, 1.5, 3.0)  # where each solution takes its time
HARD = 1.01  # times the bound: what is worse is searched twice
TIE_BREAK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """The best trial, and what no trial of this problem goes below."""

    trial: Trial
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFailure:
    """Nothing fits the budget; what would."""

    least: Least


def plan_problem(
    problem: Problem,
    machine: Machine,
    *,
    effort: Effort | None = None,
    known: Iterable[Actions] = (),
    host: HostTime | None = None,
) -> Solution | PlanFailure:
    """Return the best actions that are found.

    Args:
        problem: what its items can do is what is tried.
        machine: its budget holds at every instant.
        effort: how much is done; None: as much as pays for a problem of this size.
        known: actions to begin with, beside those of the linear program.
        host: what the host takes; None: never the limit.
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
    if best.cost > bound_seconds * HARD:  # chance decides more there
        best = search.improve([best, *starts])
    return Solution(trial=search.drop_needless(best), bound_seconds=bound_seconds)


def choose_effort(problem: Problem) -> Effort:
    """Return how much pays: about as long for all problems, but for very large ones."""
    size = len(problem.slot_seconds) + len(problem.item_bytes)
    return Effort(
        starts=min(max(400_000 // size, 80), 800), changes=min(max(10_000_000 // size, 1500), 7000)
    )


def _solve_tighter(program: Program, problem: Problem, machine: Machine) -> list[Shares]:
    """Return solutions for a little less memory, as far as there are any."""
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
