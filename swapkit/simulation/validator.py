"""Checks that a plan is legal, and that a simulated step is possible.

The validator is independent of the planners and the simulator: it works from the trace and the
definition of a plan alone, and shares no code with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from swapkit.errors import InvalidDocument
from swapkit.ir.checks import check_machine, check_plan, check_trace
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Prediction, Schedule, Tier
from swapkit.ir.traces import Trace
from swapkit.simulation.validation.computing import Demand, Resolver, check_computing, waits
from swapkit.simulation.validation.gaps import (
    Gap,
    find_gaps,
    find_tails,
    find_touches,
    is_streamed,
)
from swapkit.simulation.validation.memory import Occupation, measure_copies, measure_device
from swapkit.simulation.validation.transfers import SwappedStorage, check_moves, pair_transfers

# ---- schedules -----------------------------------------------------------------------------------
#
# Checks that a simulated step is possible as scheduled.

ROUNDING = 1e-9  # of the step: rounding errors of summed times


def check_schedule(
    trace: Trace,
    moved: Mapping[int, Decision],
    machine: Machine,
    schedule: Schedule,
    demand: Demand,
) -> list[str]:
    """Return the violations of a schedule for the legal decisions `moved`."""
    violations = list(_check_shape(trace, schedule))
    if violations:
        return violations
    tolerance = ROUNDING * max(schedule.ends[-1], trace.seconds)
    violations += _check_recomputations(schedule, moved, demand)
    swaps = {number: each for number, each in moved.items() if each.action is Action.SWAP}
    moves, unpaired = pair_transfers(trace, schedule, swaps, demand, find_touches(trace))
    violations += unpaired
    violations += check_computing(trace, schedule, machine, demand, tolerance)
    violations += check_moves(moves, schedule, machine, tolerance)
    if violations:
        return violations  # sums mean nothing for a schedule that is out of order
    occupation = measure_device(trace, schedule, demand, moves, tolerance)
    violations += _check_room(occupation, moves, machine, schedule.prediction, tolerance)
    violations += _check_sums(trace, schedule, demand, moves, tolerance)
    return violations


def _check_shape(trace: Trace, schedule: Schedule) -> Iterator[str]:
    """Yield violations that make all further checks impossible."""
    count = len(trace.operators)
    if len(schedule.starts) != count or len(schedule.ends) != count:
        lengths = f"{len(schedule.starts)} starts and {len(schedule.ends)} ends"
        yield f"the schedule has {lengths} for {count} operators"
    times = [*schedule.starts, *schedule.ends]
    for copy in schedule.transfers:
        times += [copy.out_start, copy.out_end, copy.released, copy.in_start, copy.in_end]
    if not all(map(math.isfinite, times)):
        yield "the schedule has a time that is not finite"


def _check_recomputations(
    schedule: Schedule, moved: Mapping[int, Decision], demand: Demand
) -> Iterator[str]:
    """Yield recomputations that are missing, duplicate, not decided, or at another operator."""
    missing = {number for number, each in moved.items() if each.action is Action.RECOMPUTE}
    for each in schedule.recomputations:
        if each.storage not in missing:
            yield f"storage {each.storage}: is recomputed without a decision, or twice"
        elif each.operator != demand.needs[each.storage]:
            yield (
                f"storage {each.storage}: is recomputed before operator {each.operator}, but must "
                f"be before {demand.needs[each.storage]}"
            )
        missing.discard(each.storage)
    for number in sorted(missing):
        yield f"storage {number}: is decided to be recomputed, but is not"


def _check_room(
    occupation: Occupation,
    moves: Sequence[SwappedStorage],
    machine: Machine,
    prediction: Prediction,
    tolerance: float,
) -> Iterator[str]:
    """Yield violations of memory limits, and predictions that differ from the memory in use."""
    peak, most = occupation.peak, occupation.most
    if peak > machine.budget_bytes:
        where = f"at operator {occupation.peak_operator}"
        yield f"{peak} bytes are in use {where}, more than the budget, {machine.budget_bytes}"
    if prediction.peak_bytes > machine.budget_bytes:
        yield f"the predicted peak, {prediction.peak_bytes}, is more than the budget"
    if not peak <= prediction.peak_bytes <= most:
        yield f"the peak is {peak} bytes, but the prediction is {prediction.peak_bytes}"
    limits = (
        (Tier.HOST, machine.host_bytes, prediction.host_peak_bytes),
        (Tier.DISK, machine.disk_bytes, prediction.disk_peak_bytes),
    )
    for tier, limit, predicted in limits:
        least, most = measure_copies(moves, tier, tolerance)
        if limit is not None and max(least, predicted) > limit:
            yield f"{max(least, predicted)} bytes are on the {tier.name.lower()}, more than {limit}"
        if not least <= predicted <= most:
            yield f"{least} bytes are on the {tier.name.lower()}, but the prediction is {predicted}"


def _check_sums(
    trace: Trace,
    schedule: Schedule,
    demand: Demand,
    moves: Sequence[SwappedStorage],
    tolerance: float,
) -> Iterator[str]:
    """Yield predicted times and sizes that differ from the schedule."""
    predicted = schedule.prediction
    end = max(schedule.ends[-1], *(move.transfer.out_end for move in moves), 0.0)
    if abs(predicted.seconds - end) > tolerance:
        yield f"the step takes {end:g} s, but the prediction is {predicted.seconds:g}"
    swapped = sum(move.nbytes for move in moves)
    if predicted.swapped_bytes != swapped:
        yield f"{swapped} bytes are swapped, but the prediction is {predicted.swapped_bytes}"
    waited = _sum_waits(schedule) + end - schedule.ends[-1]
    if abs(predicted.stall_seconds - waited) > tolerance * (1 + len(trace.operators)):
        yield f"computing waits {waited:g} s, but the prediction is {predicted.stall_seconds:g}"
    again = sum(demand.rerun_seconds(trace, operator) for operator in demand.reruns)
    computing = sum(
        operator.seconds
        for number, operator in enumerate(trace.operators)
        if not waits(trace, number)
    )
    busy = sum(schedule.ends) - sum(schedule.starts) - computing
    if not again - tolerance <= predicted.recompute_seconds <= busy + tolerance:
        yield (
            f"recomputing takes {again:g} s, but the prediction is {predicted.recompute_seconds:g}"
        )


def _sum_waits(schedule: Schedule) -> float:
    pairs = zip((0.0, *schedule.ends), schedule.starts, strict=False)
    return math.fsum(start - end for end, start in pairs)


# ---- plans ---------------------------------------------------------------------------------------

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
    violations += _check_decisions(trace, moved, gaps, demand, machine)
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
    trace: Trace,
    moved: Mapping[int, Decision],
    gaps: Mapping[int, Gap],
    demand: Demand,
    machine: Machine,
) -> Iterator[str]:
    """Yield swaps to a missing disk, and releases and prefetches outside of the gap."""
    tails = find_tails(trace, moved)
    for number, decision in moved.items():
        if decision.tier is Tier.DISK and is_streamed(trace.storages[number]):
            yield f"storage {number}: goes to disk, but is a weight, which has its copy on the host"
        if decision.tier is Tier.DISK and not machine.disk_bytes:
            yield f"storage {number}: goes to disk, but the machine has no disk"
        first, need = gaps[number].last + 1, demand.needs[number]
        if decision.action is Action.RECOMPUTE:  # early for itself, perhaps not for another one
            need = gaps[number].need
        moments = {"release": decision.release, "prefetch": decision.prefetch}
        former = trace.storages[number].continues
        tail = math.inf if former is None else tails.get(former, math.inf)
        if (decision.release or 0) > tail:
            del moments["release"]  # it leaves until the next step
        yield from _check_moments(number, moments, first, need)


def _check_moments(
    number: int, moments: Mapping[str, int | None], first: int, need: int
) -> Iterator[str]:
    for what, operator in moments.items():
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
