"""Measurements of plans."""

from __future__ import annotations

import math
import re
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from benchmarks._planner_instances import Instance, compose, measure_memory
from benchmarks._planner_random import make_random_step
from swapkit.errors import InfeasibleBudget
from swapkit.ir.traces import Phase, Trace
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.planner import make_plan
from swapkit.planning.search.solving import Solution, choose_effort, plan_problem
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import simulate
from swapkit.simulation.validator import find_violations
from tests.oracles.exact import solve_exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.simulation.problems import Problem

Figures: TypeAlias = dict[str, float | int | str | None]

_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+(\.|$)")
EXACT_SECONDS = 1.0  # search time for each random problem
LEAST_SHARE_MORE = 0.02  # share of the activations added to the smallest feasible budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instance's figures. `share`: share of the activations' peak that fits the budget."""

    instance: Instance
    is_as_asked: bool  # the budget; False: it is a little above the smallest feasible one
    share: float
    slots: int
    items: int
    budget_bytes: int
    free_seconds: float  # without a limit
    full_seconds: float  # with full recompute
    bound_seconds: float
    seconds: float
    swapped_share: float  # bytes copied out over the bytes of all items
    planning_seconds: float
    violations: tuple[str, ...]

    @property
    def gap(self) -> float:
        return self.seconds / self.bound_seconds - 1

    @property
    def recovered(self) -> float:
        return self._recover(self.seconds)

    @property
    def recoverable(self) -> float:
        return self._recover(self.bound_seconds)

    def _recover(self, seconds: float) -> float:
        return (self.full_seconds - seconds) / (self.full_seconds - self.free_seconds)


def full_recompute_seconds(trace: Trace) -> float:
    """Return the seconds of a step when each layer's forward runs again before its backward."""
    again = sum(
        each.seconds
        for each in trace.operators
        if each.phase is Phase.FORWARD and _IN_A_LAYER.search(each.module)
    )
    return trace.seconds + again


def measure_instances(instances: Iterable[Instance]) -> Iterator[Row]:
    """Plan for each instance; neighbouring instances with the same step share its trace."""
    workload, trace = None, None
    for instance in instances:
        if trace is None or instance.workload != workload:
            workload, trace = instance.workload, compose(instance.workload)
        yield measure_instance(instance, trace)


def measure_instance(instance: Instance, trace: Trace) -> Row:
    machine, plan, planning_seconds = plan_within(instance.machine(trace), trace)
    schedule = simulate(trace, plan, machine)
    problem = lower(trace)
    fixed, peak = measure_memory(trace)
    return Row(
        instance=instance,
        is_as_asked=machine.budget_bytes == instance.machine(trace).budget_bytes,
        share=(machine.budget_bytes - fixed) / (peak - fixed),
        slots=len(problem.slot_seconds),
        items=len(problem.item_bytes),
        budget_bytes=machine.budget_bytes,
        free_seconds=trace.seconds,
        full_seconds=full_recompute_seconds(trace),
        bound_seconds=lower_bound(problem, machine),
        seconds=schedule.prediction.seconds,
        swapped_share=schedule.prediction.swapped_bytes / int(problem.item_bytes.sum()),
        planning_seconds=planning_seconds,
        violations=tuple(find_violations(trace, plan, machine, schedule)),
    )


def plan_within(machine: Machine, trace: Trace) -> tuple[Machine, Plan, float]:
    """Plan; if the machine's budget is infeasible, use a little more than the smallest feasible."""
    begin = time.perf_counter()
    try:
        plan = make_plan(trace, machine)
    except InfeasibleBudget as error:
        fixed, peak = measure_memory(trace)
        more = int(LEAST_SHARE_MORE * (peak - fixed))
        machine = replace(machine, budget_bytes=error.least_bytes + more)
        begin = time.perf_counter()
        plan = make_plan(trace, machine)
    return machine, plan, time.perf_counter() - begin


def measure_exact(count: int, most_items: int) -> Figures:
    """Compare plans with the best known schedules of random problems, and name the worst."""
    pairs: list[tuple[float, int]] = []
    proven = infeasible = seed = 0
    while len(pairs) < count:
        trace, machine = make_random_step(seed, most_items)
        seed += 1
        try:
            plan = make_plan(trace, machine)
        except InfeasibleBudget:
            infeasible += 1
            continue
        seconds = simulate(trace, plan, machine).prediction.seconds
        best_seconds, is_proven = find_best(lower(trace), machine)
        proven += is_proven
        # If the best is not proven optimal, the plan itself may be the best known.
        pairs.append((seconds / (best_seconds if is_proven else min(best_seconds, seconds)), seed))
    gaps = [ratio - 1 for ratio, _ in pairs]
    return {
        "exact_instances": len(pairs),
        "exact_proven": proven,
        "exact_infeasible": infeasible,
        "exact_gap_median": statistics.median(gaps),
        "exact_gap_worst": max(gaps),
        "exact_gap_worst_seed": max(pairs)[1] - 1,
        "exact_gap_min": min(gaps),
    }


def find_best(problem: Problem, machine: Machine) -> tuple[float, bool]:
    """Return the seconds of the best known schedule, and whether it is proven optimal.

    With up to about ten items it is the optimum. Otherwise it is the better result of the same
    search, stopped by its time limit, and of planning with much more effort.
    """
    exact = solve_exact(problem, machine, time_limit_s=EXACT_SECONDS)
    if exact.is_proven:
        return exact.seconds, True
    usual = choose_effort(problem)
    effort = replace(usual, starts=8 * usual.starts, changes=8 * usual.changes, seed=1)
    found = plan_problem(problem, machine, effort=effort)
    seconds = found.trial.run.seconds if isinstance(found, Solution) else math.inf
    return min(exact.seconds, seconds), False


def measure_planning(instances: dict[str, Instance]) -> Figures:
    """Return the planning time of each instance: the median of three times."""
    figures: Figures = {}
    for size, instance in instances.items():
        trace = compose(instance.workload)
        times = [plan_within(instance.machine(trace), trace)[2] for _ in range(3)]
        problem = lower(trace)
        figures |= {
            f"planning_seconds_{size}": statistics.median(times),
            f"planning_slots_{size}": len(problem.slot_seconds),
            f"planning_items_{size}": len(problem.item_bytes),
        }
    return figures
