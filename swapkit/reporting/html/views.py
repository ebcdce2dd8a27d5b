"""What a page shows of a record, as values: the simulated step, and the steps of the run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit.errors import SwapkitError
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.planning.reasons import explain_decisions
from swapkit.reporting.html.lanes import list_blocks, list_spans
from swapkit.reporting.plans import OUTSIDE
from swapkit.reporting.text import Holder
from swapkit.simulation.occupancy import Layer, find_peak, measure_occupancy
from swapkit.simulation.timeline import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.plans import Schedule
    from swapkit.ir.runs import StepRecord
    from swapkit.ir.traces import Trace
    from swapkit.planning.reasons import Reason
    from swapkit.reporting.html.lanes import ModuleSpan, WorkBlock
    from swapkit.reporting.run_records import RunRecord
    from swapkit.simulation.occupancy import Occupancy, Presence

MOST_ROWS = 2500  # of memory over a step
MOST_HOLDERS = 10  # of the peak
MOST_STEPS = 1500  # that the figures of a run show
_NO_PLAN = Plan(decisions=(), budget_bytes=1 << 60)
_NO_LIMIT = Machine(budget_bytes=1 << 60, out_bytes_per_second=1e9, in_bytes_per_second=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The step of a trace: simulated with its plan, or else without one.

    Times are seconds, multiplied by the record's pace.
    """

    occupancy: Occupancy
    blocks: tuple[WorkBlock, ...]
    reasons: tuple[Reason, ...]
    spans: tuple[ModuleSpan, ...]  # of computing
    peak_holders: tuple[Holder, ...]  # of memory, the largest ones
    operators: int
    why_not_planned: str  # why the plan is not followed; empty: it is

    @property
    def is_planned(self) -> bool:
        """Whether the step follows the plan."""
        return not self.why_not_planned


def view_step(record: RunRecord) -> StepView | None:
    """Return the step of a record; None: no step was recorded."""
    trace = record.trace
    if trace is None:
        return None
    plan, why = _find_plan(record)
    machine = _NO_LIMIT
    if not why and record.machine is not None:
        machine = replace(record.machine, budget_bytes=plan.budget_bytes)
    try:
        schedule = simulate(trace, plan, machine)
    except SwapkitError as error:  # the plan of another version, or of another machine
        why = f"the plan cannot be simulated on this machine: {error}"
        plan, machine = _NO_PLAN, _NO_LIMIT
        schedule = simulate(trace, plan, machine)
    reasons = explain_decisions(trace, plan, machine, schedule) if not why else ()
    schedule = _pace(schedule, record.pace)
    return StepView(
        occupancy=measure_occupancy(trace, plan, schedule, most_rows=MOST_ROWS),
        blocks=tuple(list_blocks(trace, schedule)),
        reasons=reasons,
        spans=tuple(list_spans(trace, schedule)),
        peak_holders=tuple(_list_peak(trace, plan, schedule)),
        operators=len(trace.operators),
        why_not_planned=why,
    )


def _list_peak(trace: Trace, plan: Plan, schedule: Schedule) -> list[Holder]:
    """Return the largest holders of memory when the most is in use."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for stay in find_peak(trace, plan, schedule):
        total = totals[_name_stay(trace, stay)]
        total[0] += stay.nbytes
        total[1] += 1
    holders = [Holder(name, nbytes, count) for name, (nbytes, count) in totals.items()]
    return sorted(holders, key=lambda each: (-each.nbytes, each.name))[:MOST_HOLDERS]


def _name_stay(trace: Trace, stay: Presence) -> str:
    if stay.storage is None or stay.layer not in {Layer.SAVED, Layer.TEMPORARY, Layer.INPUT}:
        return stay.layer.value
    storage = trace.storages[stay.storage]
    if storage.is_saved:
        return f"{storage.module or OUTSIDE}#{storage.index}"
    if storage.birth < 0:
        return f"{stay.layer.value}, made before the step"
    maker = trace.operators[storage.birth]
    return f"{stay.layer.value}: {maker.name} in {maker.module or OUTSIDE}"


def _find_plan(record: RunRecord) -> tuple[Plan, str]:
    """Return the plan to follow, and why it is not the record's."""
    if record.plan is None:
        return _NO_PLAN, why_no_plan(record)
    if record.machine is None:
        return _NO_PLAN, (
            "the plan was given to the session, which did not measure the speed of the links that "
            "the plan's copies take"
        )
    return record.plan, ""


def why_no_plan(record: RunRecord) -> str:
    """Return why a record has no plan, as the rest of a sentence."""
    if record.why_no_plan:
        return record.why_no_plan
    if record.policy == "rescue":
        return "with policy='rescue' a session makes no plan"
    steps = record.stats.steps
    done = f"{steps} {'step' if steps == 1 else 'steps'}"
    if record.trace is None:
        return f"no step was recorded yet ({done}, stage {record.stage!r})"
    return f"the session is in stage {record.stage!r} after {done}, and tries plans"


def _pace(schedule: Schedule, pace: float) -> Schedule:
    """Return a schedule with all times multiplied, but not the work of recomputations."""
    transfers = tuple(
        replace(
            each,
            out_start=each.out_start * pace,
            out_end=each.out_end * pace,
            released=each.released * pace,
            in_start=each.in_start * pace,
            in_end=each.in_end * pace,
        )
        for each in schedule.transfers
    )
    return replace(
        schedule,
        starts=tuple(each * pace for each in schedule.starts),
        ends=tuple(each * pace for each in schedule.ends),
        transfers=transfers,
        stalls=tuple(replace(each, seconds=each.seconds * pace) for each in schedule.stalls),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step of a run, or several in a row: the longest time, the highest peak, all rescues."""

    first: int
    last: int
    stage: str
    seconds: float
    peak_bytes: int
    rescues: int
    moved_bytes: int  # copied out


def view_run(steps: Sequence[StepRecord], *, most: int = MOST_STEPS) -> list[StepPoint]:
    """Return the steps of a run as at most `most` points."""
    size = -(-len(steps) // most) if steps else 1
    points = []
    for first in range(0, len(steps), size):
        group = steps[first : first + size]
        points.append(
            StepPoint(
                first=group[0].step,
                last=group[-1].step,
                stage=group[0].stage,  # the least settled
                seconds=max(each.seconds for each in group),
                peak_bytes=max(each.peak_bytes for each in group),
                rescues=sum(each.rescues for each in group),
                moved_bytes=sum(each.swapped_out_bytes for each in group),
            )
        )
    return points
