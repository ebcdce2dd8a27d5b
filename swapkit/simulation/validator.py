"""Checks that a plan is legal, and that a simulated step is possible.

The validator is independent of the planners and the simulator: it works from the trace and the
definition of a plan alone, and shares no code with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from swapkit.errors import InvalidDocument
from swapkit.ir.checks import check_machine, check_plan, check_trace
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Schedule, Tier
from swapkit.ir.traces import Trace
from swapkit.simulation.validation.computing import Demand, Resolver
from swapkit.simulation.validation.gaps import Gap, find_gaps, find_touches
from swapkit.simulation.validation.schedules import check_schedule

RELATIVE_TOLERANCE = 1e-6


def find_violations(
    trace: Trace, plan: Plan, machine: Machine, schedule: Schedule | None = None
) -> list[str]:
    """Return the violations of a plan, and of a schedule that follows it; empty: there are none.

    A plan is legal if each storage that it moves is idle, can be recomputed where the plan says so,
    and is released and prefetched within its gap. A schedule is possible if operators and copies
    are in order and no faster than the machine, memory stays within the budget and the limits of
    host and disk at every instant, and its prediction matches its times and sizes.

    Returns:
        One sentence for each violation.
    """
    try:
        check_trace(trace)
        check_machine(machine)
        check_plan(plan, trace)
    except InvalidDocument as error:
        return [str(error)]
    touches = find_touches(trace)
    gaps = find_gaps(trace, touches)
    moved = {each.storage: each for each in plan.decisions if each.action is not Action.KEEP}
    violations = [
        f"storage {number}: cannot be planned, as it is not saved, or not idle between forward "
        "and its next read"
        for number in moved
        if number not in gaps
    ]
    if violations:
        return violations
    actions = {number: decision.action for number, decision in moved.items()}
    demand = Resolver(trace, touches, gaps, actions, _find_early(moved)).resolve()
    violations += demand.violations
    violations += _check_decisions(moved, gaps, demand, machine)
    violations += _check_prediction(plan, trace)
    if schedule is None or violations:
        return violations
    scheduled = {each.storage: each.operator for each in schedule.recomputations}
    demand = Resolver(trace, touches, gaps, actions, scheduled).resolve()
    violations += demand.violations
    if not violations:
        violations += check_schedule(trace, moved, machine, schedule, demand)
    return violations


def _find_early(moved: Mapping[int, Decision]) -> dict[int, int]:
    """Return the operators before which a plan recomputes storages ahead of their needs."""
    return {
        number: each.prefetch
        for number, each in moved.items()
        if each.action is Action.RECOMPUTE and each.prefetch is not None
    }


def _check_decisions(
    moved: Mapping[int, Decision], gaps: Mapping[int, Gap], demand: Demand, machine: Machine
) -> Iterator[str]:
    """Yield swaps to a missing disk, and releases and prefetches outside of the gap."""
    for number, decision in moved.items():
        if decision.tier is Tier.DISK and not machine.disk_bytes:
            yield f"storage {number}: goes to disk, but the machine has no disk"
        first, need = gaps[number].last + 1, demand.needs[number]
        if decision.action is Action.RECOMPUTE:  # early for itself, perhaps not for another one
            need = gaps[number].need
        for what, operator in (("release", decision.release), ("prefetch", decision.prefetch)):
            if operator is not None and not first <= operator <= need:
                yield (
                    f"storage {number}: its {what} is operator {operator}, but it is idle from "
                    f"operator {first} on, and operator {need} needs it"
                )


def _check_prediction(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield contradictions between a plan's prediction and the plan or the trace."""
    if plan.prediction is None:
        return
    seconds, bound = plan.prediction.seconds, plan.bound_seconds
    if bound is not None and seconds < bound * (1 - RELATIVE_TOLERANCE):
        yield f"the prediction, {seconds:g} s, is below the bound of all plans, {bound:g} s"
    swapped = sum(
        trace.storages[each.storage].nbytes for each in plan.decisions if each.action is Action.SWAP
    )
    if plan.prediction.swapped_bytes != swapped:
        yield f"the plan swaps {swapped} bytes, but predicts {plan.prediction.swapped_bytes}"
    if not math.isclose(seconds, max(seconds, trace.seconds), rel_tol=RELATIVE_TOLERANCE):
        yield (
            f"the prediction, {seconds:g} s, is below the time of the operators, "
            f"{trace.seconds:g} s"
        )
