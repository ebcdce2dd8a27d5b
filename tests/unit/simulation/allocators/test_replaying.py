"""Replays: peaks, the first failure, and what was reserved without use when memory was wanted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from swapkit.ir.allocations import (
    AllocationEvent,
    AllocationEventKind,
    AllocationTrace,
    allocations_of_intervals,
)
from swapkit.simulation.allocators import (
    ExpandableAllocator,
    Failure,
    NativeAllocator,
    expandable_peak,
    native_peak,
    replay,
)
from swapkit.simulation.allocators.rounding import MIB

# Four blocks of 30 MiB, of which the first and third end; then 60 MiB, and 10 MiB in a hole.
HOLES = allocations_of_intervals(
    [(0, 4, 30 * MIB), (1, 9, 30 * MIB), (2, 5, 30 * MIB), (3, 9, 30 * MIB), (6, 9, 60 * MIB),
     (7, 8, 10 * MIB)]
)  # fmt: skip


def test_native_when_blocks_leave_holes_then_reserves_anew() -> None:
    outcome = replay(HOLES, NativeAllocator())
    assert outcome.peak_reserved_bytes == 180 * MIB
    assert outcome.peak_allocated_bytes == 130 * MIB
    assert outcome.stranded_bytes == 60 * MIB  # when it took the last 60
    assert outcome.failure is None
    assert outcome.addresses == tuple(at * MIB for at in (0, 30, 60, 90, 120, 0))
    assert "180.00 MiB reserved, 130.00 MiB" in repr(outcome)


def test_native_when_the_budget_fits_by_giving_back_then_served() -> None:
    outcome = replay(HOLES, NativeAllocator(budget_bytes=140 * MIB))
    assert outcome.failure is None
    assert outcome.peak_reserved_bytes == 130 * MIB  # in the end, for 10 MiB more


def test_failure_when_memory_ends_then_says_where_and_what_is_held() -> None:
    outcome = replay(HOLES, NativeAllocator(budget_bytes=119 * MIB))
    assert outcome.failure == Failure(
        event=3,
        block=3,
        asked_bytes=30 * MIB,
        reserved_bytes=90 * MIB,
        allocated_bytes=90 * MIB,
    )
    assert outcome.peak_reserved_bytes == 90 * MIB
    assert len(outcome.addresses) == 3


@pytest.mark.promise("E4")
def test_stranded_when_a_request_fails_in_pieces_then_what_is_free() -> None:
    pieces = [(number, 40 if number % 2 else 10, 5 * MIB) for number in range(8)]
    trace = allocations_of_intervals([*pieces, (20, 30, 15 * MIB)])
    for allocator in (
        NativeAllocator(budget_bytes=40 * MIB), ExpandableAllocator(budget_bytes=40 * MIB)
    ):  # fmt: skip
        outcome = replay(trace, allocator)
        assert outcome.failure is not None
        assert outcome.failure.allocated_bytes == 20 * MIB
        assert outcome.stranded_bytes == 20 * MIB


def test_streams_when_replayed_then_kept_apart() -> None:
    blocks = tuple(
        dataclasses.replace(block, stream=number % 2) for number, block in enumerate(HOLES.blocks)
    )
    trace = dataclasses.replace(HOLES, blocks=blocks)
    assert replay(trace, ExpandableAllocator()).peak_reserved_bytes != (
        replay(HOLES, ExpandableAllocator()).peak_reserved_bytes
    )


def test_step_when_it_ends_then_passed_on() -> None:
    class Counting(NativeAllocator):
        steps = 0

        def end_step(self) -> None:
            self.steps += 1

    step = AllocationEvent(kind=AllocationEventKind.STEP)
    trace = AllocationTrace(blocks=HOLES.blocks, events=(*HOLES.events, step, step))
    allocator = Counting()
    replay(trace, allocator)
    assert allocator.steps == 2
    assert replay(trace, NativeAllocator()).failure is None


def test_peaks_when_of_arrays_then_those_of_the_replay() -> None:
    lifetimes = SimpleNamespace(
        starts=np.array([6, 0, 1, 2, 3, 7, 5, 3]),
        ends=np.array([9, 4, 9, 5, 9, 8, 5, 9]),
        nbytes=np.array([60, 30, 30, 30, 30, 10, 500, 0]) * MIB,  # one never lives, one has none
    )
    assert native_peak(lifetimes) == replay(HOLES, NativeAllocator()).peak_reserved_bytes
    assert expandable_peak(lifetimes) == replay(HOLES, ExpandableAllocator()).peak_reserved_bytes


def test_peaks_when_a_block_ends_as_another_begins_then_its_memory_serves() -> None:
    lifetimes = SimpleNamespace(starts=[3, 0], ends=[5, 3], nbytes=[20 * MIB, 20 * MIB])
    assert native_peak(lifetimes) == 20 * MIB
    assert expandable_peak(lifetimes) == 20 * MIB
