"""Sends one trace through all allocators."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.replay.allocations import max_live_bytes
from benchmarks.replay.expandable import ExpandableAllocator
from benchmarks.replay.native import NativeAllocator
from benchmarks.replay.planned_pool import PlannedPool
from benchmarks.replay.pool import ReplayedPool
from benchmarks.replay.replaying import replay
from benchmarks.replay.texts import AllocatorReport, TraceDemand
from swapkit.planning.layout.lifetimes import ROUNDING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.replay.allocations import AllocationTrace
    from benchmarks.replay.replaying import ReplayOutcome

_SEARCH_STEPS = 8  # halvings between what is live and what an allocator reserves without a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An allocator to compare. `run` replays a trace within a budget (None: no limit)."""

    key: str
    name: str
    run: Callable[[int | None], ReplayOutcome]
    planned: PlannedPool | None = None


def measure_demand(trace: AllocationTrace) -> TraceDemand:
    """Return what a trace asks for."""
    given = {~move for move in trace.moves if move < 0}
    sizes = [block.nbytes for block in trace.blocks]
    kept = [nbytes for number, nbytes in enumerate(sizes) if number not in given]
    return TraceDemand(
        present_bytes=sum(sizes[: trace.present]),
        kept=len(kept),
        kept_bytes=sum(kept),
        max_live_bytes=max_live_bytes(trace),
        max_live_rounded_bytes=max_live_bytes(trace, rounding=ROUNDING_BYTES),
    )


def list_candidates(trace: AllocationTrace, planned: PlannedPool) -> list[Candidate]:
    """Return torch's allocators, the pool, and the pool with addresses planned for the trace."""
    return [
        Candidate(
            key="torch_native",
            name="torch",
            run=lambda budget: replay(trace, NativeAllocator(budget_bytes=budget)),
        ),
        Candidate(
            key="torch_expandable",
            name="torch, expandable segments",
            run=lambda budget: replay(trace, ExpandableAllocator(budget_bytes=budget)),
        ),
        Candidate(key="pool", name="swapkit's pool", run=partial(_run_pool, trace)),
        Candidate(key="planned", name="planned addresses", run=planned.run, planned=planned),
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
    with closing(PlannedPool(trace)) as planned:
        return [
            _report(trace, candidate, budget_bytes, search_least)
            for candidate in list_candidates(trace, planned)
        ]


def _report(
    trace: AllocationTrace,
    candidate: Candidate,
    budget_bytes: int | None,
    search_least: bool,  # noqa: FBT001 - as `compare_allocators` got it by keyword
) -> AllocatorReport:
    free = candidate.run(None)
    least_bytes = None
    if search_least:
        fails = max_live_bytes(trace, rounding=ROUNDING_BYTES) - 1
        least_bytes = _find_least(candidate, free.peak_reserved_bytes, fails)
    return AllocatorReport(
        key=candidate.key,
        name=candidate.name,
        free=free,
        within=None if budget_bytes is None else candidate.run(budget_bytes),
        least_bytes=least_bytes,
        is_planned=candidate.planned is not None,
        layout=None if candidate.planned is None else candidate.planned.layout,
    )


def _run_pool(trace: AllocationTrace, budget_bytes: int | None) -> ReplayOutcome:
    with closing(ReplayedPool(budget_bytes=budget_bytes)) as pool:
        return replay(trace, pool)


def _find_least(candidate: Candidate, fits: int, fails: int) -> int:
    """Return the least budget found that serves a trace, by halving the range in question.

    An allocator that runs without a limit never needs more than it reserves then. Less may do,
    because an allocator gives cached memory back before it fails.
    """
    for _ in range(_SEARCH_STEPS):
        tried = (fits + fails) // 2
        if tried <= fails:
            break
        if candidate.run(tried).failure is None:
            fits = tried
        else:
            fails = tried
    return fits
