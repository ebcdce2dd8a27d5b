"""Texts about a replay: how much memory each allocator reserves for the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.reporting.text import format_table
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.replay.allocations import AllocationTrace
    from benchmarks.replay.replaying import ReplayOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDemand:
    """What a trace asks for, whatever the allocator; amounts are bytes."""

    present_bytes: int  # of blocks from before the step
    kept: int  # blocks that are never given
    kept_bytes: int
    max_live_bytes: int  # most requested at once
    max_live_rounded_bytes: int  # the same in blocks of whole 512 bytes

    @property
    def internal(self) -> float:
        """Internal fragmentation: rounded / requested - 1."""
        return self.max_live_rounded_bytes / self.max_live_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """Planned addresses, and how the requests of a step without a limit were served."""

    height_bytes: int
    lower_bound_bytes: int  # no layout of these blocks is lower
    hits: int  # requests at their planned address
    hit_bytes: int
    requests: int
    request_bytes: int
    maps: int  # granules of memory that were mapped at an address
    splits: int  # requests that a part of a cached block served
    former_splits: int  # in a step without a layout

    @property
    def hit_share(self) -> float:
        """The share of bytes that lie as planned."""
        return self.hit_bytes / self.request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReport:
    """One allocator: its outcome without a limit, and within the budget (None: no budget)."""

    key: str  # in documents
    name: str  # for people
    free: ReplayOutcome
    within: ReplayOutcome | None = None
    least_bytes: int | None = None  # the least budget that serves the trace; None: not searched
    is_planned: bool = False
    layout: LayoutReport | None = None  # of planned addresses; None: the step got none

    def external(self, demand: TraceDemand) -> float:
        """Return the external fragmentation: reserved / most live in blocks of 512 bytes - 1."""
        return self.free.peak_reserved_bytes / demand.max_live_rounded_bytes - 1

    @property
    def layout_excess(self) -> float | None:
        """The height of a layout / its lower bound - 1; None: there is no layout."""
        if self.layout is None:
            return None
        return self.layout.height_bytes / self.layout.lower_bound_bytes - 1

    @property
    def unused_bytes(self) -> int:
        """What is reserved and cannot be used: `stranded_bytes`, or what a plan reserves too much.

        A planned step reserves all along what it needs at its peak.
        """
        if self.is_planned:
            return self.free.peak_reserved_bytes - self.free.peak_allocated_bytes
        return self.free.stranded_bytes

    @property
    def active_utilisation(self) -> float:
        """Most bytes in blocks in use / most bytes reserved, as GMLake reports it."""
        return self.free.peak_allocated_bytes / self.free.peak_reserved_bytes

    def requested_utilisation(self, demand: TraceDemand) -> float:
        """Return the most bytes requested / most bytes reserved, as STAlloc reports it."""
        return demand.max_live_bytes / self.free.peak_reserved_bytes


def format_replay(
    trace: AllocationTrace,
    demand: TraceDemand,
    reports: Sequence[AllocatorReport],
    *,
    budget_bytes: int | None = None,
) -> str:
    """Return the figures of a replay as text: the demand, a table, and failures."""
    heads = ["allocator", "reserved", "in blocks", "external", "in blocks/reserved",
             "requested/reserved", "unused"]  # fmt: skip
    if any(each.least_bytes is not None for each in reports):
        heads.append("fits from")
    if budget_bytes is not None:
        heads.append(f"within {format_bytes(budget_bytes)}")
    lines = [*_describe(trace, demand), ""]
    lines.append(format_table(heads, [_row(each, demand) for each in reports]))
    layouts = [_describe_layout(each) for each in reports if each.is_planned]
    failures = [line for each in reports for line in _failure(trace, each)]
    parts = filter(None, (layouts, failures))
    return "\n".join([*lines, *(line for part in parts for line in ("", *part))])


def _describe(trace: AllocationTrace, demand: TraceDemand) -> list[str]:
    name = trace.label or "the trace"
    return [
        f"{name}: {len(trace.blocks)} blocks in {len(trace.moves)} events",
        f"from before the step: {trace.present} ({format_bytes(demand.present_bytes)}); "
        f"never given back: {demand.kept} ({format_bytes(demand.kept_bytes)})",
        f"most in use at once: {format_bytes(demand.max_live_bytes)} requested, "
        f"{format_bytes(demand.max_live_rounded_bytes)} in blocks of whole 512 bytes (internal "
        f"fragmentation {demand.internal:.2%})",
    ]


def _row(report: AllocatorReport, demand: TraceDemand) -> list[str]:
    free = report.free
    excess = report.layout_excess
    row = [
        report.name + ("" if excess is None else f" (layout +{excess:.2%})"),
        format_bytes(free.peak_reserved_bytes),
        format_bytes(free.peak_allocated_bytes),
        f"{report.external(demand):+.2%}",
        f"{report.active_utilisation:.1%}",
        f"{report.requested_utilisation(demand):.1%}",
        format_bytes(report.unused_bytes),
    ]
    if report.least_bytes is not None:
        row.append(format_bytes(report.least_bytes))
    if report.within is not None:
        row.append("fits" if report.within.failure is None else "out of memory")
    return row


def _describe_layout(report: AllocatorReport) -> str:
    """Return how the requests of a step were served at planned addresses."""
    layout = report.layout
    if layout is None:
        return (
            f"{report.name}: the step gets none, because too few of its bytes repeat or are of one "
            "stream"
        )
    return (
        f"{report.name}: {layout.hits} of {layout.requests} requests of a step lie as planned "
        f"({layout.hit_share:.2%} of the bytes), which maps {layout.maps} granules and splits "
        f"{layout.splits} cached blocks ({layout.former_splits} before)"
    )


def _failure(trace: AllocationTrace, report: AllocatorReport) -> list[str]:
    """Return where an allocator fails within the budget."""
    failure = None if report.within is None else report.within.failure
    if failure is None:
        return []
    label = trace.blocks[failure.block].label
    where = f" in {label}" if label else ""
    return [
        f"{report.name}: out of memory at event {failure.event} of {len(trace.moves)}: "
        f"{format_bytes(failure.asked_bytes)} requested{where}; "
        f"{format_bytes(failure.reserved_bytes)} reserved, "
        f"{format_bytes(failure.allocated_bytes)} allocated"
    ]
