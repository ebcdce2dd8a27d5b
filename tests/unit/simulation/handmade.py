"""Schedules of tiny steps, made by hand, that are right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swapkit.ir.machines import Machine
from swapkit.ir.plans import (
    Action,
    Decision,
    Plan,
    Prediction,
    Recomputation,
    Schedule,
    Transfer,
)
from swapkit.simulation.validator import find_violations
from tests.unit.simulation.steps import B, F, I, make_step, with_operator

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace

MACHINE = Machine(budget_bytes=1132, out_bytes_per_second=100.0, in_bytes_per_second=100.0)
# Input 0 becomes 1, that 2, that 3; backward reads 3, 2 and 1, the first also makes a gradient.
STEP = with_operator(
    make_step(
        [(F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)), (B, (3,), (4,)), (B, (2,), ()),
         (B, (1, 4, 0), ())],
        {0: 7, 1: 100, 2: 20, 3: 10, 4: 5},
        saved=(1, 2, 3),
        base_bytes=1000,
    ),
    2,
    workspace_bytes=30,
)  # fmt: skip


def plan_of(*decisions: Decision) -> Plan:
    return Plan(decisions=decisions, budget_bytes=MACHINE.budget_bytes)


def with_copy(schedule: Schedule, number: int = 0, **changes: Any) -> Schedule:
    """Return a schedule with one transfer changed."""
    transfers = list(schedule.transfers)
    transfers[number] = replace(transfers[number], **changes)
    return replace(schedule, transfers=tuple(transfers))


def predicting(schedule: Schedule, **changes: Any) -> Schedule:
    """Return a schedule with another prediction."""
    return replace(schedule, prediction=replace(schedule.prediction, **changes))


def found(schedule: Schedule, plan: Plan, machine: Machine = MACHINE, trace: Trace = STEP) -> str:
    return "\n".join(find_violations(trace, plan, machine, schedule))


KEPT = Schedule(
    starts=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0),
    ends=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    transfers=(),
    recomputations=(),
    stalls=(),
    prediction=Prediction(seconds=6.0, peak_bytes=1167),
)
# 1 goes in operator 1 and is back just in time, in operator 4: 1000 + 7 + 100 + 20 + 5.
SWAP = plan_of(Decision(storage=1, action=Action.SWAP, release=2, prefetch=4))
COPY = Transfer(storage=1, out_start=1.0, out_end=2.0, released=2.0, in_start=4.0, in_end=5.0)
SWAPPED = replace(
    KEPT,
    transfers=(COPY,),
    prediction=Prediction(seconds=6.0, peak_bytes=1132, host_peak_bytes=100, swapped_bytes=100),
)
# 2 is made again from 1, before operator 4: 1000 + 7 + 100 + 20 + 10 in operator 2 is 1167.
AGAIN = plan_of(Decision(storage=2, action=Action.RECOMPUTE))
REPEATED = replace(
    KEPT,
    starts=(0.0, 1.0, 2.0, 3.0, 4.0, 6.0),
    ends=(1.0, 2.0, 3.0, 4.0, 6.0, 7.0),
    recomputations=(Recomputation(storage=2, operator=4),),
    prediction=Prediction(seconds=7.0, peak_bytes=1167, recompute_seconds=1.0),
)
AMPLE = replace(MACHINE, budget_bytes=1167)
# 1 is made in operator 0 and read in 3, 2 in 1 and 4; operator 2 is a pause.
DUPLEX = make_step(
    [(F, (0,), (1,)), (F, (0,), (2,)), (I, (), ()), (B, (1,), ()), (B, (2,), ())],
    {0: 1, 1: 100, 2: 100},
    saved=(1, 2),
)
DUPLEX = with_operator(DUPLEX, 2, seconds=2.0)
BOTH = plan_of(*(Decision(storage=each, action=Action.SWAP) for each in (1, 2)))
CROSSING = Schedule(
    starts=(0.0, 1.0, 2.0, 4.0, 5.0),
    ends=(1.0, 2.0, 4.0, 5.0, 6.0),
    transfers=(
        Transfer(storage=1, out_start=1.0, out_end=2.0, released=2.0, in_start=2.0, in_end=3.0),
        Transfer(storage=2, out_start=2.0, out_end=3.0, released=3.0, in_start=4.0, in_end=5.0),
    ),
    recomputations=(),
    stalls=(),
    prediction=Prediction(seconds=6.0, peak_bytes=201, host_peak_bytes=200, swapped_bytes=200),
)
