"""The recorded step of a session as simulated, for the page of a report and for a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from swapkit.errors import SwapkitError
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan, Recomputation, Schedule
from swapkit.ir.traces import Trace
from swapkit.planning.reasons import Reason, explain_decisions
from swapkit.simulation.timeline import simulate

# Kinds of work; that of an operator is its phase.
WAITING, RECOMPUTE, COPY_OUT, COPY_IN = "waiting for a copy", "recompute", "copy out", "copy in"
_NO_PLAN = Plan(decisions=(), budget_bytes=1 << 60)
_NO_LIMIT = Machine(budget_bytes=1 << 60, out_bytes_per_second=1e9, in_bytes_per_second=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A recorded step with its plan, or else without one."""

    trace: Trace
    plan: Plan
    schedule: Schedule
    reasons: tuple[Reason, ...] = ()
    why_not_planned: str = ""  # why no plan is followed; empty: one is


def simulate_step(
    trace: Trace, plan: Plan | None, machine: Machine | None, why_none: str
) -> SimulatedStep:
    """Return a step, planned as far as the plan is known and can be simulated.

    Args:
        trace: the recorded step.
        plan: None: there is none.
        machine: that the plan is for; None: not measured.
        why_none: why there is no plan.
    """
    why = why_none
    if plan is not None and machine is None:
        why = "the plan was given to the session, which did not measure the speed of the links"
    elif plan is not None and machine is not None:
        machine = replace(machine, budget_bytes=plan.budget_bytes)
        try:
            schedule = simulate(trace, plan, machine)
            reasons = explain_decisions(trace, plan, machine, schedule)
            return SimulatedStep(trace=trace, plan=plan, schedule=schedule, reasons=reasons)
        except SwapkitError as error:  # the plan of another version, or of another machine
            why = f"the plan cannot be simulated on this machine: {error}"
    schedule = simulate(trace, _NO_PLAN, _NO_LIMIT)
    return SimulatedStep(trace=trace, plan=_NO_PLAN, schedule=schedule, why_not_planned=why)


class Work(NamedTuple):
    """A stretch of time of computing or of a link, in seconds from the start of the step."""

    kind: str
    start: float
    end: float
    operator: int = -1  # that runs, waits, or needs what is recomputed
    storage: int = -1  # that is copied, waited for, or recomputed


def list_works(step: SimulatedStep) -> Iterator[Work]:
    """Yield all work of a step: of each operator in their order, then the copies.

    A schedule has the time of an operator together with what is recomputed right before it: each
    gets its share, in proportion to the time that it would take alone.
    """
    schedule = step.schedule
    again: defaultdict[int, list[Recomputation]] = defaultdict(list)
    for made in schedule.recomputations:
        again[made.operator].append(made)
    stalls = {stall.operator: stall for stall in schedule.stalls}
    before = 0.0
    for number, operator in enumerate(step.trace.operators):
        start, end = schedule.starts[number], schedule.ends[number]
        if number in stalls:
            stall = stalls[number]
            since = max(before, start - stall.seconds)
            yield Work(WAITING, since, start, number, stall.storage)
        before = end
        alone = operator.seconds + sum(made.seconds for made in again[number])
        rate = (end - start) / alone if alone > 0 else 0.0
        for made in again[number]:
            until = min(end, start + rate * made.seconds)
            yield Work(RECOMPUTE, start, until, number, made.storage)
            start = until
        yield Work(operator.phase.value, start, end, number)
    for copy in schedule.transfers:
        yield Work(COPY_OUT, copy.out_start, copy.out_end, storage=copy.storage)
        yield Work(COPY_IN, copy.in_start, copy.in_end, storage=copy.storage)
