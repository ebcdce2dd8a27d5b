"""The curve of a stage: its step under plans for several budgets, cut into the stage's jobs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pipelines.early import find_early
from benchmarks.pipelines.ways import Cost, StageWays, Way
from swapkit.ir.traces import Phase
from swapkit.planning.lean_plans import QUICK
from swapkit.planning.planner import restrict
from swapkit.planning.search.feasibility import find_least
from swapkit.planning.search.solving import Solution, plan_problem
from swapkit.simulation.lowering import lower
from swapkit.simulation.schedules import make_schedule
from swapkit.simulation.timeline import as_plan, predict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Schedule
    from swapkit.ir.traces import Trace
    from swapkit.planning.search.moves import Actions, Trial
    from swapkit.simulation.problems import Problem

SHARES = (0.97, 0.9, 0.8, 0.65, 0.45, 0.2, 0.0)  # budgets between the least and the machine's
WORTH = 0.25  # of a job's time; a job with less slack does not recompute to save memory


def measure_curve(
    trace: Trace,
    machine: Machine,
    *,
    room: Sequence[float] = (),
    policy: str = "auto",
    shares: Sequence[float] = SHARES,
) -> StageWays:
    """Return the ways of a stage: plans for the machine's budget, and for less.

    The first is the plan that the stage would have alone. The others leave the jobs as they are
    that the pipeline waits for: they recompute only in jobs with room.

    Args:
        trace: the stage's step with an idle operator before each job, and before the optimizer.
        machine: the stage's machine; no way takes more than its budget.
        room: for each job, how much longer it could take with no loss for the pipeline's step, or
            how long the bubble before it is.
        policy: "auto", "swap" or "recompute".
        shares: other budgets, between the smallest one with a plan and the machine's.

    Returns:
        The ways; none if no plan fits the machine's budget.
    """
    bounds = bounds_of(trace)
    ways: list[Way] = []
    problem = restrict(lower(trace), policy)
    own = plan_problem(problem, machine)
    if isinstance(own, Solution):
        ways.append(_make_way(trace, problem, machine, own.trial))
        others = [problem] if policy == "recompute" else []
        others.append(_recompute_in(problem, bounds, [each > 0 for each in room]))
        for other in others:
            ways += _measure(trace, other, machine, shares)
    found = {(each.peak_bytes, each.costs): each for each in reversed(ways)}
    return StageWays(ways=tuple(reversed(found.values())), kinds=range(len(bounds) - 2))


def _recompute_in(problem: Problem, bounds: Sequence[int], jobs: Sequence[bool]) -> Problem:
    """Return the problem in which only some jobs recompute."""
    allowed = np.zeros(len(problem.slot_seconds), np.bool_)
    firsts = problem.slot_operators[:-1]
    for (first, end), is_allowed in zip(pairwise(bounds), jobs, strict=False):
        allowed[(firsts >= first) & (firsts < end)] = is_allowed
    return replace(problem, can_recompute=problem.can_recompute & allowed[problem.uses])


def _measure(
    trace: Trace, problem: Problem, machine: Machine, shares: Sequence[float]
) -> Iterator[Way]:
    """Yield the ways for several budgets, from the smallest to the largest."""
    most = min(machine.budget_bytes, trace.peak_bytes)
    least = find_least(problem, replace(machine, budget_bytes=1)).budget_bytes
    between = {least + round(share * (most - least)) for share in (*shares, 1.0)}
    known: list[Actions] = []
    for budget_bytes in sorted(between):
        if least > most:
            return
        within = replace(machine, budget_bytes=budget_bytes)
        solution = plan_problem(problem, within, effort=QUICK, known=known)
        if isinstance(solution, Solution):
            known = [solution.trial.actions]
            yield _make_way(trace, problem, within, solution.trial)


def _make_way(trace: Trace, problem: Problem, machine: Machine, trial: Trial) -> Way:
    run, actions = trial.run, trial.actions
    schedule = make_schedule(trace, problem, actions, run, predict(run))
    seconds, tail = cut_jobs(trace, schedule)
    early = find_early(problem, run, actions, bounds_of(trace)[:-1], machine.budget_bytes)
    costs = tuple(
        Cost(duration, min(duration, ahead)) for duration, ahead in zip(seconds, early, strict=True)
    )
    return Way(
        peak_bytes=run.peak_bytes,
        costs=costs,
        tail_seconds=tail,
        swapped_bytes=run.swapped_bytes,
        recompute_seconds=run.recompute_seconds,
        plan=as_plan(trace, problem, machine, actions, run, policy="pipeline"),
    )


def bounds_of(trace: Trace) -> list[int]:
    """Return the idle operators before each job and before the optimizer; then the end."""
    idle = [number for number, each in enumerate(trace.operators) if each.phase is Phase.IDLE]
    return [*idle, len(trace.operators)]


def cut_jobs(
    trace: Trace, schedule: Schedule, bounds: Sequence[int] | None = None
) -> tuple[list[float], float]:
    """Return the duration of each job, and of the optimizer.

    Recomputing and waiting for copies count, also where the wait is in the bubble before the job.

    Args:
        trace: the step of a stage.
        schedule: its times.
        bounds: where its jobs begin; None: as in `bounds_of`.
    """
    durations, clock = [], 0.0
    for first, after in pairwise(bounds or bounds_of(trace)):
        operators, end = trace.operators[first:after], schedule.ends[after - 1]
        idle = sum(each.seconds for each in operators if each.phase is Phase.IDLE)
        durations.append(max(0.0, end - clock - idle))
        clock = end
    return durations[:-1], durations[-1]
