"""The reasons for a plan's decisions, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Schedule, Tier
from swapkit.ir.traces import Kind, Trace
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import simulate


class Why(enum.Enum):
    """The reason for a decision, in words."""

    FITS = "it fits in the budget"
    HIDDEN = "its copies cost no compute time"
    CHEAPER_COPY = "copying, with the wait for it, is cheaper than recomputing"
    CHEAPER_RECOMPUTE = "recomputing is cheaper than copying"
    IN_WAIT = "it is recomputed while the step waits for other ranks"
    BUSY_LINK = "the link has no time left for its copies"
    ONLY_COPY = "it cannot be recomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The decision for one storage, its cost, and the cost of the alternative.

    Prices are seconds per byte. `link_price`: computing waits while a link copies the byte.
    """

    storage: int
    module: str  # the module that saved it first, and its number there
    index: int
    action: Action
    tier: Tier
    nbytes: int
    why: Why
    recompute_seconds: float | None  # of this storage alone; None: it cannot be recomputed
    recompute_price: float | None
    link_price: float
    copy_seconds: float  # out and back
    hidden_seconds: float = 0.0  # of the copies, while computing goes on
    exposed_seconds: float = 0.0  # of the copies, while computing waits


def explain_decisions(
    trace: Trace, plan: Plan, machine: Machine, schedule: Schedule | None = None
) -> tuple[Reason, ...]:
    """Return a row for each storage that could be moved, in the order of storages.

    Args:
        trace: the step.
        plan: the plan for the step.
        machine: the machine that the step runs on.
        schedule: the plan's schedule on the machine; None: simulate the plan.

    Raises:
        InfeasibleBudget: the plan does not fit the machine.
    """
    schedule = simulate(trace, plan, machine) if schedule is None else schedule
    decisions = {decision.storage: decision for decision in plan.decisions}
    exposed: dict[int, float] = {}
    for stall in schedule.stalls:
        exposed[stall.storage] = exposed.get(stall.storage, 0.0) + stall.seconds
    copying = {
        each.storage: each.out_end - each.out_start + each.in_end - each.in_start
        for each in schedule.transfers
    }
    costs = _list_costs(trace, plan)
    return tuple(
        _explain(
            trace,
            machine,
            decisions.get(storage, Decision(storage=storage, action=Action.KEEP)),
            costs[storage],
            (copying.get(storage, 0.0), exposed.get(storage, 0.0)),
        )
        for storage in sorted(costs)
    )


def _list_costs(trace: Trace, plan: Plan) -> dict[int, float | None]:
    """Return the recompute time of each storage; None: it cannot be recomputed."""
    moves_states = any(
        trace.storages[each.storage].kind is Kind.OPTIMIZER_STATE for each in plan.decisions
    )
    problem = lower(trace, optimizer_states=moves_states)
    costs: dict[int, float | None] = {each.storage: None for each in plan.decisions}
    for item, storage in enumerate(problem.item_storages.tolist()):
        chain = problem.steps_of(item)
        possible = bool(problem.can_recompute[item])
        costs[storage] = float(problem.step_seconds[chain].sum()) if possible else None
    return costs


def _explain(
    trace: Trace,
    machine: Machine,
    decision: Decision,
    cost: float | None,
    copies: tuple[float, float],
) -> Reason:
    storage = trace.storages[decision.storage]
    link_price = 1 / min(machine.out_bytes_per_second, machine.in_bytes_per_second)
    price = None if cost is None else cost / max(storage.nbytes, 1)
    spent, exposed = copies
    exposed = min(exposed, spent)
    return Reason(
        storage=decision.storage,
        module=storage.module,
        index=storage.index,
        action=decision.action,
        tier=decision.tier,
        nbytes=storage.nbytes,
        why=_find_why(decision, price, link_price, exposed),
        recompute_seconds=cost,
        recompute_price=price,
        link_price=link_price,
        copy_seconds=spent,
        hidden_seconds=spent - exposed,
        exposed_seconds=exposed,
    )


def _find_why(decision: Decision, price: float | None, link_price: float, exposed: float) -> Why:
    if decision.action is Action.KEEP:
        return Why.FITS
    if decision.action is Action.RECOMPUTE:
        if decision.prefetch is not None:
            return Why.IN_WAIT
        cheap = price is not None and price <= link_price
        return Why.CHEAPER_RECOMPUTE if cheap else Why.BUSY_LINK
    if exposed == 0:
        return Why.HIDDEN
    return Why.ONLY_COPY if price is None else Why.CHEAPER_COPY
