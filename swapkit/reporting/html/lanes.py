"""A simulated step as blocks in lanes: computing, recomputing, and copies out and in.

A screen has some thousand columns, a step may have a hundred thousand operators. Neighbours that
would be narrower than a column are therefore joined into one block.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from swapkit.reporting.machines import format_seconds
from swapkit.reporting.plans import OUTSIDE
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from swapkit.ir.plans import Schedule
    from swapkit.ir.traces import Trace

LEAST_NAMED = 0.03  # share of a step: a part of the model that computes for so long has its name
MOST_COLUMNS = 1500  # that a step is drawn with; narrower blocks are joined


class Lane(enum.Enum):
    """A row of the figure."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    OUT = "copy out"
    IN = "copy in"


WAITING = "waiting"  # the kind of a block in which computing waits for a copy


@dataclass(frozen=True, slots=True)
class WorkBlock:
    """Some work in a lane. `kind`: the phase of operators, `WAITING`, or the lane's name."""

    lane: Lane
    start: float  # seconds from the start of the step
    end: float
    kind: str
    label: str
    detail: str


class ModuleSpan(NamedTuple):
    """Neighbouring operators of one part of the model, in the lane of computing."""

    name: str  # such as "layers.3"
    start: float  # seconds from the start of the step
    end: float


class _Work(NamedTuple):
    start: float
    end: float
    kind: str
    name: str  # such as "aten.mm.default"; empty for copies
    place: str  # such as "model.layers.7.mlp"
    nbytes: int = 0


def list_blocks(trace: Trace, schedule: Schedule) -> list[WorkBlock]:
    """Return the blocks of all lanes, joined where they are narrow.

    Args:
        trace: the step.
        schedule: the simulated step.
    """
    least = schedule.ends[-1] / MOST_COLUMNS
    transfers = schedule.transfers
    out = [
        _Work(each.out_start, each.out_end, Lane.OUT.value, "", *_site(trace, each.storage))
        for each in sorted(transfers, key=lambda each: each.out_start)
    ]
    back = [
        _Work(each.in_start, each.in_end, Lane.IN.value, "", *_site(trace, each.storage))
        for each in sorted(transfers, key=lambda each: each.in_start)
    ]
    lanes = {
        Lane.COMPUTE: _list_computing(trace, schedule),
        Lane.RECOMPUTE: _list_recomputing(trace, schedule),
        Lane.OUT: out,
        Lane.IN: back,
    }
    return [
        _describe(lane, group) for lane, works in lanes.items() for group in _join(works, least)
    ]


def list_spans(trace: Trace, schedule: Schedule) -> Iterator[ModuleSpan]:
    """Yield the parts of the model that compute for long enough to be named in a figure."""
    least = schedule.ends[-1] * LEAST_NAMED
    current: ModuleSpan | None = None
    for number, operator in enumerate(trace.operators):
        name = _name_part(operator.module)
        end = schedule.ends[number]
        if current is not None and current.name == name:
            current = current._replace(end=end)
            continue
        if current is not None and current.name and current.end - current.start >= least:
            yield current
        current = ModuleSpan(name, schedule.starts[number], end)
    if current is not None and current.name and current.end - current.start >= least:
        yield current


def _name_part(module: str) -> str:
    """Return a module's path up to its first number: alike blocks have one."""
    parts = module.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: first + 1])


def _site(trace: Trace, number: int) -> tuple[str, int]:
    storage = trace.storages[number]
    return f"{storage.module or OUTSIDE}#{storage.index}", storage.nbytes


def _again(trace: Trace, schedule: Schedule) -> dict[int, float]:
    """Return the seconds that recomputing takes at the start of operators."""
    work: defaultdict[int, float] = defaultdict(float)
    for made in schedule.recomputations:
        work[made.operator] += made.seconds
    spans = {}
    for operator, seconds in work.items():
        span = schedule.ends[operator] - schedule.starts[operator]
        whole = seconds + trace.operators[operator].seconds
        spans[operator] = span * seconds / whole if whole else 0.0
    return spans


def _list_computing(trace: Trace, schedule: Schedule) -> Iterator[_Work]:
    """Yield the operators, and the waits before them."""
    again = _again(trace, schedule)
    before = 0.0
    waited_for = {stall.operator: stall.storage for stall in schedule.stalls}
    for number, operator in enumerate(trace.operators):
        start, end = schedule.starts[number], schedule.ends[number]
        if number in waited_for and start > before:
            site, nbytes = _site(trace, waited_for[number])
            yield _Work(before, start, WAITING, "", site, nbytes)
        start += again.get(number, 0.0)
        if operator.name and end > start:
            yield _Work(start, end, operator.phase.value, operator.name, operator.module or OUTSIDE)
        before = end


def _list_recomputing(trace: Trace, schedule: Schedule) -> Iterator[_Work]:
    again = _again(trace, schedule)
    made: defaultdict[int, list[int]] = defaultdict(list)
    for each in schedule.recomputations:
        made[each.operator].append(each.storage)
    for operator in sorted(made):
        start = schedule.starts[operator]
        sites = [_site(trace, storage) for storage in made[operator]]
        nbytes = sum(nbytes for _, nbytes in sites)
        more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        yield _Work(
            start, start + again[operator], Lane.RECOMPUTE.value, "", sites[0][0] + more, nbytes
        )


def _join(works: Iterable[_Work], least: float) -> Iterator[list[_Work]]:
    """Yield works in groups: neighbours of a kind, until a group is `least` wide."""
    group: list[_Work] = []
    for work in works:
        if work.end <= work.start:
            continue
        if group:
            last = group[-1]
            is_near = work.kind == last.kind and work.start - last.end < least
            is_narrow = work.end - group[0].start < least or (
                last.end - group[0].start < least and work.end - work.start < least
            )
            if is_near and is_narrow:
                group.append(work)
                continue
            yield group
        group = [work]
    if group:
        yield group


def _describe(lane: Lane, group: Sequence[_Work]) -> WorkBlock:
    first, last = group[0], group[-1]
    took = format_seconds(sum(each.end - each.start for each in group))
    longest = max(group, key=lambda each: each.end - each.start)
    nbytes = sum(each.nbytes for each in group)
    what = longest.name or first.kind
    label = what if len(group) == 1 else f"{len(group)} of {first.kind}, the longest: {what}"
    if len(group) > 1 and not longest.name:
        label = f"{len(group)} times {first.kind}"
    place = first.place if first.place == last.place else f"{first.place} to {last.place}"
    size = f", {format_bytes(nbytes)}" if nbytes else ""
    if first.kind == WAITING:
        label, place = "waiting for a copy", f"of {place}"
    return WorkBlock(lane, first.start, last.end, first.kind, label, f"{place}{size}, {took}")
