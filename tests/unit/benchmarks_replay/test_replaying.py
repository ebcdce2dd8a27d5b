"""Replays: peaks, the first failure, and what was reserved without use when memory was wanted."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.replay.allocations import allocations_of_intervals
from benchmarks.replay.caching import MIB
from benchmarks.replay.expandable import ExpandableAllocator
from benchmarks.replay.native import NativeAllocator
from benchmarks.replay.replaying import Failure, replay

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
