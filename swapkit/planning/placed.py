"""Plans that also fit once their storages have addresses, not only in bytes.

Storages that are in memory at the same time cannot always lie beside each other without a gap, so a
step may need more memory than the bytes in use at its peak. The lifetimes of each plan are placed
(`layout/`). The height of the layout, and the memory that stays throughout the step, are what a
session reserves for the plan once its steps lie at planned addresses. A plan that does not fit is
made again for less memory.

Source:
    MindSpeed, SmartSwap: policies are checked by a simulated arrangement of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.beside import go_on
from swapkit.planning.layout.lifetimes import find_lifetimes
from swapkit.planning.layout.placing import place_quickly
from swapkit.planning.planner import Instance, PlanTarget, Policy, make_plan, make_plans, restrict
from swapkit.planning.search.local_search import Effort
from swapkit.planning.search.solving import PlanFailure, plan_problem
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import as_plan, simulate
from swapkit.units import format_bytes

ATTEMPTS = 5  # plans for less and less memory
# A session improves the layout of the plan that it follows for longer.
TOLERANCE, EFFORT = 0.005, 0.1
MOST_SECONDS = 5.0  # for a layout: a backstop
QUICK = Effort(starts=40, changes=200)  # a few percent of the usual search, of a similar result
AS_RECORDED = 1  # sizes of a trace are those of the blocks: no further rounding


def predict_reserved(trace: Trace, plan: Plan, machine: Machine) -> Plan:
    """Return the plan with the most bytes that its steps reserve at planned addresses.

    Args:
        trace: the step.
        plan: of the step, with its prediction.
        machine: the plan's budget replaces its budget.
    """
    if plan.prediction is None:
        return plan
    schedule = simulate(trace, plan, replace(machine, budget_bytes=plan.budget_bytes))
    step = find_lifetimes(trace, plan, schedule, in_session=True, rounding_bytes=AS_RECORDED)
    layout = place_quickly(
        step.lifetimes,
        tolerance=TOLERANCE,
        effort=EFFORT,
        seconds=MOST_SECONDS,
        should_stop=_should_stop,
    )
    reserved_bytes = step.resident_bytes + layout.height
    return replace(plan, prediction=replace(plan.prediction, reserved_bytes=reserved_bytes))


def _should_stop() -> bool:
    go_on()
    return False


def _maker(
    trace: Trace, machine: Machine, policy: str | Policy, *, optimizer_states: bool = False
) -> Callable[[int], Plan]:
    """Return what makes the plan for a budget, with the bytes that it reserves."""
    named = None
    if isinstance(policy, str):
        named = Instance(trace, machine, policy, optimizer_states=optimizer_states)

    def make(budget_bytes: int) -> Plan:
        allowed = replace(machine, budget_bytes=budget_bytes)
        plan = make_plan(trace, allowed, policy, optimizer_states=optimizer_states, instance=named)
        return predict_reserved(trace, plan, allowed)

    return make


def make_placed_plan(
    trace: Trace, machine: Machine, policy: str | Policy = "auto", *, optimizer_states: bool = False
) -> Plan:
    """Return the fastest plan found whose step fits at planned addresses: see `make_plan`.

    If a plan does not fit, its `budget_bytes` is the smaller budget for which it was made instead.

    Raises:
        InfeasibleBudget: there is no such plan; the error names the smallest budget that has one.
        InvalidArgument: as for `make_plan`.
    """
    make = _maker(trace, machine, policy, optimizer_states=optimizer_states)
    try:
        found = _lower(make, machine.budget_bytes)
    except InfeasibleBudget as error:
        raise _with_addresses(error, make) from error
    if reserved_bytes_of(found) <= machine.budget_bytes:
        return found
    least = _make_least(make) or found
    if reserved_bytes_of(least) <= machine.budget_bytes:
        return least
    reserved_bytes = reserved_bytes_of(least)
    raise InfeasibleBudget(
        f"plans fit {format_bytes(machine.budget_bytes)} in bytes, but at addresses their storages "
        f"take {format_bytes(reserved_bytes)} ({reserved_bytes} bytes); try that budget",
        least_bytes=reserved_bytes,
    )


def make_placed_plans(
    trace: Trace,
    *,
    share: float,
    count: int,
    target: PlanTarget,
    policy: str | Policy,
    is_quick: bool = False,
) -> tuple[Plan, ...]:
    """Return plans for a session, as `planner.make_plans` does, that fit at planned addresses.

    If no plan fits, the result is the one that needs the least: a session keeps its budget by
    rescues. `is_quick`: one plan from a brief search, not checked at addresses, or none.

    Raises:
        InfeasibleBudget: there is no plan, not even in bytes.
    """
    whole_bytes = target.machine.budget_bytes
    if is_quick and isinstance(policy, str):
        return _make_quickly(trace, share, target, policy)
    make = partial(make_plans, trace, target=target, policy=policy)
    asked_bytes = min(max(1, int(whole_bytes * share)), target.most_bytes)
    plain = _lower(_maker(trace, target.machine, policy), asked_bytes)
    if count < 2 or not isinstance(policy, str):
        return (plain,)
    others = make(share=_share_of(plain.budget_bytes, whole_bytes), count=count, plain=plain)
    placed = [
        each if reserved_bytes_of(each) else predict_reserved(trace, each, target.machine)
        for each in others
    ]
    return tuple(
        each
        for each in placed
        if each.outline() == plain.outline()
        or reserved_bytes_of(each) <= max(asked_bytes, each.budget_bytes)
    )


def _make_quickly(trace: Trace, share: float, target: PlanTarget, policy: str) -> tuple[Plan, ...]:
    """Return a plan from a brief search, which may not fit at addresses; none: there is none."""
    budget_bytes = min(max(1, int(target.machine.budget_bytes * share)), target.most_bytes)
    machine = replace(target.machine, budget_bytes=budget_bytes)
    problem = restrict(lower(trace), policy)
    solution = plan_problem(problem, machine, effort=QUICK, host=trace.host)
    if isinstance(solution, PlanFailure):
        return ()
    trial = solution.trial
    return (as_plan(trace, problem, machine, trial.actions, trial.run, policy=policy),)


def _share_of(budget_bytes: int, whole_bytes: int) -> float:
    """Return a share that is not rounded to fewer bytes."""
    return (budget_bytes + 0.5) / whole_bytes


def _lower(make: Callable[[int], Plan], budget_bytes: int) -> Plan:
    """Return a plan that fits a budget at addresses; if there is none, the one that needs least.

    A plan that does not fit is made again for less memory: first by the excess, then by more,
    because a plan for a little less may be the same.

    Raises:
        InfeasibleBudget: there is no plan in bytes.
    """
    best = plan = make(budget_bytes)
    aimed_bytes = budget_bytes = min(budget_bytes, plan.budget_bytes or budget_bytes)
    for attempt in range(ATTEMPTS):
        excess = reserved_bytes_of(plan) - budget_bytes
        if excess <= 0:
            break
        aimed_bytes -= excess << attempt
        try:
            plan = make(aimed_bytes)
        except InfeasibleBudget:
            break
        best = min(best, plan, key=reserved_bytes_of)
        if reserved_bytes_of(plan) <= budget_bytes:
            return plan
    return best


def _make_least(make: Callable[[int], Plan]) -> Plan | None:
    """Return the plan for the fewest bytes; None: the policy does not know how few."""
    try:
        return make(1)
    except InfeasibleBudget as error:
        return make(error.least_bytes) if error.least_bytes > 1 else None


def _with_addresses(error: InfeasibleBudget, make: Callable[[int], Plan]) -> InfeasibleBudget:
    """Return the error of a budget without a plan, with a least budget that holds at addresses."""
    plan = make(error.least_bytes) if error.least_bytes > 0 else None
    if plan is None or reserved_bytes_of(plan) <= error.least_bytes:
        return error
    reserved_bytes = reserved_bytes_of(plan)
    message = (
        f"{error}; at addresses, that plan takes {format_bytes(reserved_bytes)} "
        f"({reserved_bytes} bytes)"
    )
    return InfeasibleBudget(message, least_bytes=reserved_bytes, operators=error.operators)


def reserved_bytes_of(plan: Plan) -> int:
    """Return the most bytes that a plan's steps are predicted to reserve; 0: not known."""
    return 0 if plan.prediction is None else plan.prediction.reserved_bytes
