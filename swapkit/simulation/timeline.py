"""A step under a plan, as a run of its problem and as a schedule of its trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from swapkit.errors import InfeasibleBudget, PlanMismatch
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Prediction, Schedule, Tier
from swapkit.ir.traces import HostTime, Kind, Trace
from swapkit.simulation.lowering import lower
from swapkit.simulation.problems import Indexes, Problem
from swapkit.simulation.running import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK, Moments, Run, run
from swapkit.simulation.schedules import make_schedule

__all__ = [
    "KEEP",
    "RECOMPUTE",
    "SWAP",
    "SWAP_TO_DISK",
    "Moments",
    "Run",
    "as_plan",
    "find_host_seconds",
    "lower_for",
    "predict",
    "run",
    "set_moments",
    "simulate",
]

_ACTIONS = {
    SWAP: (Action.SWAP, Tier.HOST),
    RECOMPUTE: (Action.RECOMPUTE, Tier.HOST),
    SWAP_TO_DISK: (Action.SWAP, Tier.DISK),
}
_NUMBERS = {both: number for number, both in _ACTIONS.items()}
_UNBOUNDED = 1 << 62  # bytes


def predict(run: Run) -> Prediction:
    """Return the figures of a run as a plan's prediction."""
    return Prediction(
        seconds=run.seconds,
        peak_bytes=run.peak_bytes,
        host_peak_bytes=run.host_peak_bytes,
        disk_peak_bytes=run.disk_peak_bytes,
        swapped_bytes=run.swapped_bytes,
        recompute_seconds=run.recompute_seconds,
        stall_seconds=run.stall_seconds,
    )


def find_host_seconds(host: HostTime | None, actions: NDArray[np.int8]) -> float:
    """Return the host time of a step with these actions; 0: not known."""
    if host is None:
        return 0.0
    recomputed = int(np.count_nonzero(actions == RECOMPUTE))
    swapped = int(np.count_nonzero(actions != KEEP)) - recomputed
    return host.of(swapped=swapped, recomputed=recomputed)


def as_plan(
    trace: Trace,
    problem: Problem,
    machine: Machine,
    actions: NDArray[np.int8],
    run: Run,
    *,
    policy: str,
) -> Plan:
    """Return the plan that repeats a run; `problem` is of `trace`, `run` of `actions`."""

    def operator_of(slots: Indexes, item: int) -> int | None:
        slot = int(slots[item])
        return None if slot < 0 else int(problem.slot_operators[slot])

    decisions = []
    for item in np.flatnonzero(actions != KEEP).tolist():
        action, tier = _ACTIONS[int(actions[item])]
        moments = run.earlies if action is Action.RECOMPUTE else run.prefetch_slots
        decisions.append(
            Decision(
                storage=int(problem.item_storages[item]),
                action=action,
                tier=tier,
                release=operator_of(run.release_slots, item),
                prefetch=None if moments is None else operator_of(moments, item),
            )
        )
    return Plan(
        decisions=tuple(decisions),
        budget_bytes=machine.budget_bytes,
        policy=policy,
        signature=trace.signature,
        prediction=replace(predict(run), host_seconds=find_host_seconds(trace.host, actions)),
        trace=trace,
    )


def simulate(trace: Trace, plan: Plan, machine: Machine) -> Schedule:
    """Return the simulated schedule of a step under a plan.

    A copy back starts at the plan's `prefetch`, or where the storage is needed if there is none.
    Operators wait for the releases that the plan names.

    Raises:
        InfeasibleBudget: some operator can never begin.
        PlanMismatch: the plan moves a storage that is never idle, or that cannot be recomputed.
    """
    problem, actions, result = _run_plan(trace, plan, machine, is_timed=True)
    return make_schedule(trace, problem, actions, result, predict(result))


def set_moments(trace: Trace, plan: Plan, machine: Machine) -> Plan:
    """Return the plan with each copy back as early as there is room for it.

    Raises:
        InfeasibleBudget, PlanMismatch: as for `simulate`.
    """
    problem, actions, result = _run_plan(trace, plan, machine, is_timed=False)
    return as_plan(trace, problem, machine, actions, result, policy=plan.policy)


def _run_plan(
    trace: Trace, plan: Plan, machine: Machine, *, is_timed: bool
) -> tuple[Problem, NDArray[np.int8], Run]:
    problem = lower_for(trace, plan)
    actions, moments = _read_decisions(problem, plan)
    if not is_timed:
        moments = Moments(earlies=moments.earlies)

    def follow(machine: Machine) -> Run:
        return run(problem, machine, actions, moments)

    result = follow(machine)
    if result.stuck_slot >= 0:
        raise _explain(trace, problem, machine, follow)
    return problem, actions, result


def lower_for(trace: Trace, plan: Plan) -> Problem:
    """Return the problem, with every storage that the plan moves as an item, however small.

    A slot begins at each operator that the plan names as a release or prefetch.
    """
    decided = [each for each in plan.decisions if each.action is not Action.KEEP]
    moved = [each.storage for each in decided]
    moments = _moments_of(decided, len(trace.operators))
    if not all(0 <= storage < len(trace.storages) for storage in moved):
        message = "the plan decides about storages that are not in the trace"
        raise PlanMismatch(message)
    kinds = {trace.storages[storage].kind for storage in moved}
    has_states = Kind.OPTIMIZER_STATE in kinds
    problem = lower(trace, optimizer_states=has_states, boundaries=moments)
    if np.isin(moved, problem.item_storages).all():
        return problem
    least = min(trace.storages[storage].nbytes for storage in moved)
    return lower(trace, optimizer_states=has_states, least_bytes=least, boundaries=moments)


def _moments_of(decided: list[Decision], count: int) -> set[int]:
    """Return the operators below `count` that decisions name as releases or prefetches."""
    named = {moment for each in decided for moment in (each.release, each.prefetch)}
    return {moment for moment in named if moment is not None and 0 <= moment < count}


def _read_decisions(problem: Problem, plan: Plan) -> tuple[NDArray[np.int8], Moments]:
    """Return the action of each item, and the slots that the plan names."""
    items = {int(storage): item for item, storage in enumerate(problem.item_storages)}
    actions = np.zeros(len(items), np.int8)
    prefetches, releases, earlies = np.full((3, len(items)), -1, np.int32)
    starts = problem.slot_operators[:-1]
    for decision in plan.decisions:
        if decision.action is Action.KEEP:
            continue
        item = items.get(decision.storage)
        if item is None:
            message = f"storage {decision.storage} is never idle: it can only be kept"
            raise PlanMismatch(message)
        if decision.action is Action.RECOMPUTE and not problem.can_recompute[item]:
            message = f"storage {decision.storage} cannot be recomputed: keep or swap it"
            raise PlanMismatch(message)
        actions[item] = _NUMBERS[decision.action, decision.tier]
        if decision.release is not None:
            releases[item] = np.searchsorted(starts, decision.release, side="right") - 1
        if decision.prefetch is not None:
            named = earlies if decision.action is Action.RECOMPUTE else prefetches
            named[item] = np.searchsorted(starts, decision.prefetch, side="right") - 1
    return actions, Moments(prefetches, releases, earlies)


def _explain(
    trace: Trace, problem: Problem, machine: Machine, follow: Callable[[Machine], Run]
) -> InfeasibleBudget:
    """Return the error for a plan that gets stuck, with the smallest sufficient budget."""

    def run_with(budget_bytes: int) -> Run:
        return follow(replace(machine, budget_bytes=budget_bytes))

    free = run_with(_UNBOUNDED)
    at = problem.slot_operators[run_with(machine.budget_bytes).stuck_slot]
    operator = trace.operators[at]
    where = f"operator {at} ({operator.name} in {operator.module or 'the model'})"
    if free.stuck_slot >= 0:
        message = f"{where} cannot start: the plan swaps more than fits in host memory"
        return InfeasibleBudget(message, least_bytes=free.peak_bytes, operators=(operator.name,))
    budgets = range(machine.budget_bytes + 1, free.peak_bytes)
    first = bisect_left(budgets, True, key=lambda each: run_with(each).stuck_slot < 0)  # noqa: FBT003
    enough = machine.budget_bytes + 1 + first
    message = (
        f"{where} cannot start under this plan, which needs a budget of {enough} bytes and has "
        f"{machine.budget_bytes}"
    )
    return InfeasibleBudget(message, least_bytes=enough, operators=(operator.name,))
