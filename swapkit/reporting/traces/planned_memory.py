"""The bytes on the device and on the host over a planned step, from the times of its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from swapkit.ir.plans import Action, Tier
from swapkit.simulation.items import Touches, find_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from swapkit.ir.plans import Decision, Plan, Schedule
    from swapkit.ir.traces import Storage, Trace


class MemoryLevel(NamedTuple):
    """Bytes from a time on, in seconds from the start of the step."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """When each operator runs, in seconds from the start of the step."""

    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def end(self) -> float:
        """When the last operator ends."""
        return self.ends[-1] if self.ends else 0.0


def times_of(trace: Trace) -> OperatorTimes:
    """Return the times of a step in which nothing waits and nothing is recomputed."""
    ends = list(accumulate(operator.seconds for operator in trace.operators))
    return OperatorTimes([0.0, *ends[:-1]] if ends else [], ends)


def device_levels(
    trace: Trace, times: OperatorTimes, plan: Plan | None = None, schedule: Schedule | None = None
) -> list[MemoryLevel]:
    """Return the bytes in use on the device, whenever they change.

    Args:
        trace: the step.
        times: of its operators.
        plan: the plan that is followed; None: all storages stay.
        schedule: of the plan; None: all storages stay.
    """
    gaps = {} if plan is None or schedule is None else _find_gaps(trace, times, plan, schedule)
    continued = {each.continues for each in trace.storages if each.continues is not None}
    changes = [(0.0, trace.base_bytes)]
    for number, storage in enumerate(trace.storages):
        begin, end = _life_of(storage, times, is_continued=number in continued)
        if storage.death <= max(storage.birth, 0):
            continue
        changes += _stay(begin, end, storage.nbytes)
        if number in gaps:
            goes, comes = gaps[number]
            if goes < comes:
                changes += [(goes, -storage.nbytes), (comes, storage.nbytes)]
    for number, operator in enumerate(trace.operators):
        if operator.workspace_bytes:
            changes += _stay(times.starts[number], times.ends[number], operator.workspace_bytes)
    return _sum_up(changes)


def host_levels(plan: Plan, trace: Trace, schedule: Schedule) -> list[MemoryLevel]:
    """Return the bytes of copies on the host, whenever they change; copies on a disk do not count.

    A copy counts from its start to the end of the copy back.
    """
    on_host = {each.storage for each in plan.decisions if each.tier is not Tier.DISK}
    changes = [(0.0, 0)]
    for transfer in schedule.transfers:
        if transfer.storage in on_host:
            nbytes = trace.storages[transfer.storage].nbytes
            changes += _stay(transfer.out_start, transfer.in_end, nbytes)
    return _sum_up(changes)


def _life_of(storage: Storage, times: OperatorTimes, *, is_continued: bool) -> tuple[float, float]:
    """Return when a storage that stays is made and freed."""
    count = len(times.ends)
    begin = 0.0 if storage.birth < 0 else times.starts[min(storage.birth, count - 1)]
    if storage.death >= count:
        return begin, times.end
    # What continues it takes its memory over, at the start of an operator.
    end = times.starts[storage.death] if is_continued else times.ends[max(storage.death - 1, 0)]
    return begin, end


def _find_gaps(
    trace: Trace, times: OperatorTimes, plan: Plan, schedule: Schedule
) -> dict[int, tuple[float, float]]:
    """Return for each storage that leaves the device when it goes and when it comes back."""
    gaps = {each.storage: (each.released, each.in_start) for each in schedule.transfers}
    recomputed = _find_drops(trace, plan.decisions)
    for each in schedule.recomputations:
        last = recomputed.get(each.storage, -1)
        if last >= 0:
            gaps[each.storage] = times.ends[last], times.starts[each.operator]
    return gaps


def _find_drops(trace: Trace, decisions: Iterable[Decision]) -> Mapping[int, int]:
    """Return for each recomputed storage the operator after which forward drops it."""
    dropped = {each.storage for each in decisions if each.action is Action.RECOMPUTE}
    if not dropped:
        return {}
    items = find_items(Touches(trace), optimizer_states=False, least_bytes=0)
    return {each.storage: each.release for each in items if each.storage in dropped}


def _stay(begin: float, end: float, nbytes: int) -> list[tuple[float, int]]:
    return [(begin, nbytes), (end, -nbytes)]


def _sum_up(changes: list[tuple[float, int]]) -> list[MemoryLevel]:
    """Return the levels after all changes at one time."""
    totals: dict[float, int] = {}
    for seconds, change in changes:
        totals[seconds] = totals.get(seconds, 0) + change
    level, levels = 0, []
    for seconds in sorted(totals):
        level += totals[seconds]
        levels.append(MemoryLevel(seconds, level))
    return levels
