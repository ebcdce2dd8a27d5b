"""The search for the best actions of a problem, and the time of a step at any budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swapkit.errors import InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.ir.traces import BEFORE, HostTime, Kind, Trace
from swapkit.planning.bounds.bound import Program
from swapkit.planning.search.feasibility import Least, find_least
from swapkit.planning.search.local_search import Effort, Search
from swapkit.planning.search.moves import Actions, Shares, Trial, Trials
from swapkit.simulation.items import count_fitting, find_levels, is_weight
from swapkit.simulation.problems import Bytes, Problem
from swapkit.simulation.timeline import RECOMPUTE

# ---- recomputing in waits ------------------------------------------------------------------------
#
# Recomputing while the step waits for other ranks, instead of right before the need.

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


# ---- solving -------------------------------------------------------------------------------------
#
# The search for the best actions of a problem, independent of traces and plans.

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
    make_program: Callable[[], Program] | None = None,
) -> Solution | PlanFailure:
    """Return the best actions found.

    Args:
        problem: the problem; its `can_swap` and `can_recompute` limit the actions.
        machine: its budget holds at every instant.
        effort: the effort limits; None: suitable for the size of the problem.
        known: initial actions, in addition to those of the linear program.
        host: the host's time; None: the host is never the limit.
        make_program: returns the linear program of the problem, which may have been solved for
            other budgets; None: a new one.
    """
    trials = Trials(problem, machine, host)
    kept = trials.simulate(trials.keep_all())
    if kept.is_possible:
        return Solution(trial=kept, bound_seconds=kept.cost)
    effort = effort or choose_effort(problem)
    program = Program(problem, machine, host=host) if make_program is None else make_program()
    relaxation = program.solve(machine.budget_bytes)
    bound_seconds = math.inf if relaxation is None else relaxation.seconds
    search = Search(trials, effort, bound_seconds)
    starts = [trials.simulate(actions) for actions in known]
    starts += search.find_starts(_solve_tighter(program, problem, machine))
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
    for margin in (0.0, *(FEW_MARGINS if is_large else MARGINS)):
        relaxation = program.solve(
            machine.budget_bytes - int(margin * largest), tie_break=TIE_BREAK
        )
        if relaxation is None:
            break
        solutions.append(Shares(relaxation.swapped, relaxation.recomputed))
    return solutions


# ---- trade offs ----------------------------------------------------------------------------------
#
# The time of a step as a function of the budget.

SHARES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The best step for one budget."""

    budget_bytes: int
    seconds: float
    bound_seconds: float  # no plan takes less
    peak_bytes: int
    swapped_bytes: int = 0
    recompute_seconds: float = 0.0
    host_peak_bytes: int = 0  # of copies


def measure_trade_offs(
    trace: Trace, problem: Problem, machine: Machine, shares: Sequence[float]
) -> tuple[TradeOff, ...]:
    """Return the trade-off of each share, from the smallest budget to the largest."""
    if not all(share > 0 for share in shares):
        raise InvalidArgument(f"shares={tuple(shares)}: expected all above 0")
    fixed = trace.base_bytes + sum(
        storage.nbytes
        for storage in trace.storages
        if storage.birth == BEFORE and storage.kind is not Kind.INPUT and not is_weight(storage)
    )
    whole = Trials(problem, replace(machine, budget_bytes=1 << 60))
    peak = whole.simulate(whole.keep_all()).run.peak_bytes
    return measure_budgets(
        problem, machine, [fixed + round(share * (peak - fixed)) for share in shares]
    )


def measure_budgets(
    problem: Problem, machine: Machine, budgets: Iterable[int]
) -> tuple[TradeOff, ...]:
    """Return the trade-off of each budget in bytes, from the smallest to the largest.

    A budget without a plan gives the smallest one that has a plan.
    """
    best: Trial | None = None
    found: dict[int, TradeOff] = {}
    for budget in sorted(set(budgets)):
        solved, there = _solve(problem, replace(machine, budget_bytes=budget), best)
        if best is None or solved.trial.cost <= best.cost:  # with more room, it moves less
            best = solved.trial
        found[there.budget_bytes] = TradeOff(
            budget_bytes=there.budget_bytes,
            seconds=best.run.seconds,
            bound_seconds=solved.bound_seconds,
            peak_bytes=best.run.peak_bytes,
            swapped_bytes=best.run.swapped_bytes,
            recompute_seconds=best.run.recompute_seconds,
            host_peak_bytes=best.run.host_peak_bytes,
        )
    return tuple(found[budget] for budget in sorted(found))


def _solve(problem: Problem, machine: Machine, known: Trial | None) -> tuple[Solution, Machine]:
    """Return the solution for a budget, or for the smallest budget that has one."""
    actions = () if known is None else (known.actions,)
    solution = plan_problem(problem, machine, known=actions)
    if isinstance(solution, PlanFailure):
        machine = replace(machine, budget_bytes=solution.least.budget_bytes)
        solution = plan_problem(problem, machine)
    assert isinstance(solution, Solution)
    return solution, machine
