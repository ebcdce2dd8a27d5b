"""The model of expandable segments, in cases counted by hand, and its invariants."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay.caching import MIB
from benchmarks.replay.expandable import ExpandableAllocator

if TYPE_CHECKING:
    from benchmarks.replay.caching import CachedBlock, Shelf


def take(allocator: ExpandableAllocator, nbytes: int, stream: int = 0) -> int:
    address = allocator.take(nbytes, stream)
    assert address is not None
    return address


def test_large_blocks_when_taken_then_lie_in_one_segment_of_20_mib_pages() -> None:
    allocator = ExpandableAllocator()
    first = take(allocator, 33 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert take(allocator, 30 * MIB) == first + 33 * MIB  # 7 MiB were mapped, two pages more
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (80 * MIB, 63 * MIB)


def test_small_blocks_when_taken_then_lie_in_pages_of_2_mib() -> None:
    allocator = ExpandableAllocator()
    first = take(allocator, MIB)
    assert take(allocator, MIB) == first + MIB
    assert take(allocator, 512) == first + 2 * MIB
    assert allocator.reserved_bytes == 4 * MIB


def test_streams_when_they_differ_then_have_segments_of_their_own() -> None:
    allocator = ExpandableAllocator()
    allocator.give(take(allocator, 20 * MIB))
    take(allocator, 20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_rest_when_any_then_cut_off() -> None:
    allocator = ExpandableAllocator()
    take(allocator, 20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_best_fit_when_the_last_block_can_grow_then_others_first() -> None:
    allocator = ExpandableAllocator()
    hole, wall, last = (take(allocator, nbytes * MIB) for nbytes in (30, 5, 12))
    allocator.give(hole)
    allocator.give(last)  # with 13 MiB of mapped rest: 25 MiB, smaller than the hole
    assert take(allocator, 24 * MIB) == hole
    assert take(allocator, 24 * MIB) == wall + 5 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_device_when_full_then_whole_free_pages_are_unmapped_for_others() -> None:
    allocator = ExpandableAllocator(budget_bytes=100 * MIB)
    blocks = [take(allocator, 25 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 100 * MIB
    allocator.give(blocks[1])  # 25 to 50: no page of 20 MiB lies in it as a whole
    assert allocator.take(26 * MIB) is None
    assert allocator.reserved_bytes == 100 * MIB
    allocator.give(blocks[2])  # 25 to 75: the page from 40 to 60 does
    moved = take(allocator, 20 * MIB, stream=1)
    assert moved > blocks[3] + 25 * MIB
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (100 * MIB, 70 * MIB)


def test_gap_when_unmapped_then_the_lowest_is_filled_again() -> None:
    allocator = ExpandableAllocator(budget_bytes=100 * MIB)
    blocks = [take(allocator, 20 * MIB) for _ in range(5)]
    for address in blocks[1:3]:
        allocator.give(address)
    side = take(allocator, 40 * MIB, stream=1)
    allocator.give(side)
    allocator.release_cached()
    assert allocator.reserved_bytes == 60 * MIB
    assert take(allocator, 30 * MIB) == blocks[1]  # two pages mapped in the gap, one block
    assert allocator.reserved_bytes == 100 * MIB


def test_block_when_free_before_unmapped_space_then_grown_in_place() -> None:
    allocator = ExpandableAllocator()
    take(allocator, 15 * MIB)
    assert take(allocator, 45 * MIB) == 15 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_segment_when_all_free_then_gone_and_made_anew() -> None:
    allocator = ExpandableAllocator(budget_bytes=40 * MIB)
    first = take(allocator, 40 * MIB)
    allocator.give(first)
    second = take(allocator, 40 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.give(second)
    assert take(allocator, 40 * MIB) not in {first, second}


def test_request_when_larger_than_the_device_then_nothing_stays_mapped() -> None:
    allocator = ExpandableAllocator(budget_bytes=100 * MIB)
    assert allocator.take(500 * MIB) is None
    assert allocator.reserved_bytes == 0
    assert take(allocator, 100 * MIB) >= 0


def walk(shelf: Shelf) -> list[CachedBlock]:
    """Return all blocks of the segments that have a free or unmapped one, by segment."""
    found: dict[int, CachedBlock] = {}
    for block in (*shelf.blocks.values(), *shelf.unmapped_blocks.values()):
        at: CachedBlock | None = block
        while at is not None and at.before is not None:
            at = at.before
        while at is not None:
            found[at.address] = at
            at = at.after
    return [found[address] for address in sorted(found)]


def check_shelf(shelf: Shelf) -> int:
    """Check that blocks tile their segments and are sorted; return the mapped bytes."""
    blocks = walk(shelf)
    for block in blocks:
        if block.after is not None:
            assert block.address + block.nbytes == block.after.address
            both_free = block.is_free and block.after.is_free
            assert not (both_free and block.is_mapped is block.after.is_mapped)
    for nbytes, address in shelf.order:
        assert shelf.blocks[address].nbytes == nbytes
    return sum(block.nbytes for block in blocks if block.is_mapped)


def check(allocator: ExpandableAllocator, sizes: dict[int, int]) -> None:
    """Check every segment, the sums, and that blocks in use do not overlap."""
    mapped = sum(check_shelf(shelf) for shelf in allocator._shelves.values())
    assert mapped == allocator.reserved_bytes
    assert sum(sizes.values()) == allocator.allocated_bytes <= allocator.reserved_bytes
    for (low, nbytes), (high, _) in pairwise(sorted(sizes.items())):
        assert low + nbytes <= high


REQUESTS = st.sampled_from([512, 70_144, MIB, MIB + 512, 3 * MIB, 9 * MIB, 20 * MIB, 41 * MIB])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.booleans(), REQUESTS, st.integers(0, 1)), max_size=80),
    st.integers(30, 200),
)
def test_model_when_used_at_random_then_its_blocks_tile_the_segments(
    moves: list[tuple[bool, int, int]], budget: int
) -> None:
    allocator = ExpandableAllocator(budget_bytes=budget * MIB)
    sizes: dict[int, int] = {}
    for is_give, nbytes, stream in moves:
        if is_give and sizes:
            address = list(sizes)[nbytes % len(sizes)]
            del sizes[address]
            allocator.give(address)
        else:
            found = allocator.take(nbytes, stream)
            if found is not None:
                assert found not in sizes
                sizes[found] = nbytes
        assert allocator.reserved_bytes <= budget * MIB
        check(allocator, sizes)
    for address in sizes:
        allocator.give(address)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
