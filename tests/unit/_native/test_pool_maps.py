"""What the pool's statistics say of granules that come, move and go, and of blocks that split."""

from __future__ import annotations

import pytest

from swapkit._native.backend import Backend
from swapkit._native.layout import TAG_OPTIMIZER, Lives, LivesMode
from swapkit._native.pool import Pool, RingKind, set_tag

MIB = 1 << 20
GRANULE = 4 << 10
BUDGET = 8 * MIB
CAPACITY = 64 * MIB


def test_stats_when_memory_comes_moves_and_goes_then_its_maps_and_unmaps_are_counted() -> None:
    with (
        Backend.cpu(capacity_bytes=CAPACITY) as backend,
        Pool(backend, budget_bytes=BUDGET) as pool,
    ):
        pieces = [pool.take(2 * MIB) for _ in range(4)]
        assert pool.moving_seconds() == 0.0
        assert (pool.stats()["maps"], pool.stats()["unmaps"]) == (8 * MIB // GRANULE, 0)
        pool.give(pieces[0])
        pool.give(pieces[2])
        pieces[0:1] = [pool.take(4 * MIB)]
        moved = pool.stats()["moved_bytes"] // GRANULE
        assert moved > 0
        assert pool.stats()["maps"] == 8 * MIB // GRANULE + moved
        assert pool.stats()["unmaps"] == moved
        assert pool.stats()["moving_ns"] > 0
        assert pool.moving_seconds() == pool.stats()["moving_ns"] / 1e9
        pool.note(RingKind.MARK)  # the end of a step needs no ring
        for address in (pieces[0], pieces[1], pieces[3]):
            pool.give(address)
        pool.trim()
        assert pool.stats()["maps"] == pool.stats()["unmaps"]
        assert pool.stats()["alias_failures"] == 0  # host memory has one address
        pool.reset_accumulated()
        assert pool.stats()["moving_ns"] == 0


@pytest.mark.promise("F21")
def test_take_when_memory_is_ample_then_new_memory_else_a_part_of_what_lives_differently() -> None:
    with (
        Backend.cpu(capacity_bytes=CAPACITY) as backend,
        Pool(backend, budget_bytes=BUDGET) as pool,
    ):
        Lives(pool).set_mode(LivesMode.SEPARATE)
        pool.give(pool.take(4 * MIB))
        outer_tag = set_tag(TAG_OPTIMIZER)
        try:
            kept = [pool.take(2 * MIB) for _ in range(2)]
            assert (pool.reserved_bytes(), pool.stats()["num_splits"]) == (BUDGET, 0)
            kept.append(pool.take(2 * MIB))
            assert (pool.reserved_bytes(), pool.stats()["num_splits"]) == (BUDGET, 1)
        finally:
            set_tag(outer_tag)
        for address in kept:
            pool.give(address)
        pool.reset_accumulated()
        assert pool.stats()["num_splits"] == 0
