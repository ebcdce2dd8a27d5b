"""Sends one trace through all allocators."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.ir.allocations import AllocationEventKind, max_live_bytes
from swapkit.replay.planning import plan_addresses
from swapkit.reporting.replays import AllocatorReport, TraceDemand
from swapkit.simulation.allocators import ExpandableAllocator, NativeAllocator, replay
from swapkit.simulation.allocators.layout import ROUNDING_BYTES, LayoutAllocator
from swapkit.simulation.allocators.pool import ReplayedPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.allocations import AllocationTrace
    from swapkit.simulation.allocators.replaying import ReplayedAllocator, ReplayOutcome

_SEARCH_STEPS = 8  # halvings between what is live and what an allocator reserves without a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An allocator to compare: how to make one with a budget (None: no limit)."""

    key: str
    name: str
    make: Callable[[int | None], ReplayedAllocator]
    lower_bound_bytes: int | None = None  # of planned addresses


def measure_demand(trace: AllocationTrace) -> TraceDemand:
    """Return what a trace asks for."""
    kinds = [event.kind for event in trace.events]
    given = {event.block for event in trace.events if event.kind is AllocationEventKind.GIVE}
    sizes = [block.nbytes for block in trace.blocks]
    kept = [nbytes for number, nbytes in enumerate(sizes) if number not in given]
    return TraceDemand(
        requests=len(sizes),
        events=len(kinds),
        steps=kinds.count(AllocationEventKind.STEP),
        present=trace.present,
        present_bytes=sum(sizes[: trace.present]),
        kept=len(kept),
        kept_bytes=sum(kept),
        max_live_bytes=max_live_bytes(trace),
        max_live_rounded_bytes=max_live_bytes(trace, rounding=ROUNDING_BYTES),
    )


def list_candidates(trace: AllocationTrace) -> list[Candidate]:
    """Return torch's allocators, the pool, and addresses planned for the trace."""
    planned = plan_addresses(trace)
    return [
        Candidate(
            key="torch_native",
            name="torch",
            make=lambda budget: NativeAllocator(budget_bytes=budget),
        ),
        Candidate(
            key="torch_expandable",
            name="torch, expandable segments",
            make=lambda budget: ExpandableAllocator(budget_bytes=budget),
        ),
        Candidate(
            key="pool",
            name="swapkit's pool",
            make=lambda budget: ReplayedPool(budget_bytes=budget),
        ),
        Candidate(
            key="planned",
            name="planned addresses",
            make=lambda budget: LayoutAllocator(planned.offsets, budget_bytes=budget),
            lower_bound_bytes=planned.lower_bound_bytes,
        ),
    ]


def compare_allocators(
    trace: AllocationTrace, *, budget_bytes: int | None = None, search_least: bool = False
) -> list[AllocatorReport]:
    """Replay a trace through each allocator, without a limit and within one.

    Args:
        trace: with at least one block.
        budget_bytes: the memory of the device for the second replay; None: there is none.
        search_least: also find the least budget that serves the trace.
    """
    return [
        _report(trace, candidate, budget_bytes, search_least)
        for candidate in list_candidates(trace)
    ]


def _report(
    trace: AllocationTrace,
    candidate: Candidate,
    budget_bytes: int | None,
    search_least: bool,  # noqa: FBT001 - as `compare_allocators` got it by keyword
) -> AllocatorReport:
    free = _run(trace, candidate, None)
    return AllocatorReport(
        key=candidate.key,
        name=candidate.name,
        free=free,
        within=None if budget_bytes is None else _run(trace, candidate, budget_bytes),
        least_bytes=_find_least(trace, candidate, free) if search_least else None,
        lower_bound_bytes=candidate.lower_bound_bytes,
    )


def _run(trace: AllocationTrace, candidate: Candidate, budget_bytes: int | None) -> ReplayOutcome:
    allocator = candidate.make(budget_bytes)
    with closing(allocator) if isinstance(allocator, ReplayedPool) else nullcontext():
        return replay(trace, allocator)


def _find_least(trace: AllocationTrace, candidate: Candidate, free: ReplayOutcome) -> int:
    """Return the least budget found that serves a trace, by halving the range in question.

    An allocator that runs without a limit never needs more than it reserves then. Less may do,
    because an allocator gives cached memory back before it fails.
    """
    fits = free.peak_reserved_bytes
    fails = max_live_bytes(trace, rounding=ROUNDING_BYTES) - 1
    for _ in range(_SEARCH_STEPS):
        tried = (fits + fails) // 2
        if tried <= fails:
            break
        if _run(trace, candidate, tried).failure is None:
            fits = tried
        else:
            fails = tried
    return fits
