"""The real pool in replays: its figures are those of the pool, and it touches no memory."""

from __future__ import annotations

import dataclasses
import resource

import pytest

from benchmarks.replay.allocations import allocations_of_intervals
from benchmarks.replay.caching import MIB
from benchmarks.replay.native import NativeAllocator
from benchmarks.replay.pool import GRANULE_BYTES, ReplayedPool
from benchmarks.replay.replaying import replay
from tests.unit.benchmarks_replay.test_replaying import HOLES

GIB = 1 << 30


def test_pool_when_there_is_no_limit_then_figures_are_the_pool_s() -> None:
    allocator = ReplayedPool()
    outcome = replay(HOLES, allocator)
    stats = allocator.pool.stats()
    assert outcome.failure is None
    assert outcome.peak_allocated_bytes == stats["allocated_bytes.all.peak"] == 130 * MIB
    assert outcome.peak_reserved_bytes == stats["reserved_bytes.all.peak"]
    assert outcome.peak_reserved_bytes % GRANULE_BYTES == 0
    allocator.close()


@pytest.mark.promise("E4")
def test_pool_when_free_memory_is_in_pieces_then_moved_together() -> None:
    pieces = [(number, 40 if number % 2 else 10, 6 * MIB) for number in range(8)]
    trace = allocations_of_intervals([*pieces, (20, 30, 18 * MIB)])
    assert replay(trace, NativeAllocator(budget_bytes=60 * MIB)).failure is not None
    allocator = ReplayedPool(budget_bytes=48 * MIB)
    outcome = replay(trace, allocator)
    assert outcome.failure is None
    assert outcome.peak_reserved_bytes <= 48 * MIB
    allocator.pool.check()
    allocator.close()


def test_pool_when_memory_is_80_gib_then_none_is_touched() -> None:
    trace = allocations_of_intervals([(number, 40, 4 * GIB) for number in range(20)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    allocator = ReplayedPool()
    outcome = replay(trace, allocator)
    allocator.close()
    assert outcome.peak_reserved_bytes == 80 * GIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_budget_when_reached_then_the_failure_and_the_pool_is_still_sound() -> None:
    allocator = ReplayedPool(budget_bytes=100 * MIB)
    outcome = replay(HOLES, allocator)
    assert outcome.failure is not None
    assert (outcome.failure.block, outcome.failure.asked_bytes) == (3, 30 * MIB)
    assert outcome.failure.allocated_bytes == 90 * MIB
    assert outcome.failure.reserved_bytes <= 100 * MIB
    allocator.pool.check()
    allocator.close()  # with three blocks in use


def test_streams_when_there_are_several_then_each_is_one_of_the_backend() -> None:
    blocks = tuple(
        dataclasses.replace(block, stream=number % 3) for number, block in enumerate(HOLES.blocks)
    )
    allocator = ReplayedPool()
    assert replay(dataclasses.replace(HOLES, blocks=blocks), allocator).failure is None
    assert len({block.stream for block in allocator.pool.blocks()}) == 3
    allocator.close()
