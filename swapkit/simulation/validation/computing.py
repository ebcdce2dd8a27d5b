"""Checks that operators run in order and long enough, and that stalls are as stated.

An operator that only waits for a transfer between ranks may take less than in the trace, by what
was delayed since the latest start of a transfer (or since the operator before, if there is none).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

from swapkit.ir.traces import is_wait, starts_transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Schedule
    from swapkit.ir.traces import Trace
    from swapkit.simulation.validation.recomputing import Demand

Span = tuple[float, float]


def check_computing(
    trace: Trace, schedule: Schedule, machine: Machine, demand: Demand, tolerance: float
) -> Iterator[str]:
    """Yield operators that start too early or are too short, and stalls that are not as stated."""
    before = 0.0
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
        if start < before - tolerance:
            yield f"operator {number}: starts at {start:g}, but the previous one ends at {before:g}"
        work = demand.rerun_seconds(trace, number)
        if waits(trace, number):
            work = max(work, _find_arrival(trace, schedule, number) - start)
        else:
            work += trace.operators[number].seconds
        if end - start < work - tolerance:
            yield f"operator {number}: lasts {end - start:g} s, but needs {work:g}"
        before = end
    yield from _check_interference(trace, schedule, machine, demand, tolerance)
    yield from _check_stalls(schedule, tolerance)


def waits(trace: Trace, number: int) -> bool:
    """Return whether an operator waits for a transfer between ranks."""
    return is_wait(trace.operators[number].name) and number > 0


def _find_arrival(trace: Trace, schedule: Schedule, number: int) -> float:
    """Return when the transfer that an operator waits for is done."""
    began = number - 1
    while began > 0 and not starts_transfer(trace.operators[began].name):
        began -= 1
    if not starts_transfer(trace.operators[began].name):
        began = number - 1
    between = trace.operators[began + 1 : number + 1]
    return schedule.ends[began] + math.fsum(each.seconds for each in between)


def _check_interference(
    trace: Trace, schedule: Schedule, machine: Machine, demand: Demand, tolerance: float
) -> Iterator[str]:
    """Yield runs of operators without a wait that are too short for the concurrent copies."""
    copies = _join(
        [(each.out_start, each.out_end) for each in schedule.transfers]
        + [(each.in_start, each.in_end) for each in schedule.transfers]
    )
    slowed = machine.interference / (1 + machine.interference)
    first, work, disturbed = 0, 0.0, 0.0
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
        if waits(trace, number):  # copies do not slow down others' transfers
            work += end - start
        else:
            work += trace.operators[number].seconds + demand.rerun_seconds(trace, number)
            disturbed += _overlap(start, end, copies)
        is_last = number + 1 == len(schedule.starts)
        if not is_last and schedule.starts[number + 1] - end <= tolerance:
            continue
        lasted = end - schedule.starts[first]
        if lasted - slowed * disturbed < work - tolerance * (number - first + 1):
            yield (
                f"operators {first} to {number}: last {lasted:g} s, but need {work:g}, and copies "
                f"slow them down for {disturbed:g}"
            )
        first, work, disturbed = number + 1, 0.0, 0.0


def _check_stalls(schedule: Schedule, tolerance: float) -> Iterator[str]:
    """Yield operators whose wait differs from the sum of their stalls."""
    stated: defaultdict[int, float] = defaultdict(float)
    for stall in schedule.stalls:
        if not 0 <= stall.operator < len(schedule.starts):
            yield f"operator {stall.operator}: has a stall, but does not exist"
        stated[stall.operator] += stall.seconds
    before = 0.0
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
        if abs(start - before - stated[number]) > 2 * tolerance:
            yield (
                f"operator {number}: waits {start - before:g} s, but its stalls add up to "
                f"{stated[number]:g} s"
            )
        before = end


def _join(spans: list[Span]) -> list[Span]:
    """Return spans in order, with overlapping spans merged."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _overlap(start: float, end: float, spans: Sequence[Span]) -> float:
    """Return the total time of ordered, disjoint spans inside `start` to `end`."""
    total = 0.0
    for other_start, other_end in spans[max(0, bisect_right(spans, (start, math.inf)) - 1) :]:
        if other_start >= end:
            break
        total += max(0.0, min(end, other_end) - max(start, other_start))
    return total
