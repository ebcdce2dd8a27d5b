"""The model of torch's default allocator, in cases counted by hand and against a plain twin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay.caching import MIB
from benchmarks.replay.native import DeviceAddresses, NativeAllocator, segment_bytes
from tests.unit.benchmarks_replay.reference import PlainNative


def take(allocator: NativeAllocator, nbytes: int, stream: int = 0) -> int:
    address = allocator.take(nbytes, stream)
    assert address is not None
    return address


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segment_when_made_then_2_or_20_mib_or_whole_2_mib(nbytes: int, expected: int) -> None:
    assert segment_bytes(nbytes) == expected


def test_small_requests_when_taken_then_share_a_segment_of_2_mib() -> None:
    allocator = NativeAllocator()
    assert [take(allocator, nbytes) for nbytes in (1, 513, MIB)] == [0, 512, 1536]
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (2 * MIB, MIB + 1536)
    take(allocator, MIB)  # less than 1 MiB is left
    assert allocator.reserved_bytes == 4 * MIB


def test_small_rest_when_512_bytes_then_cut_off() -> None:
    allocator = NativeAllocator()
    take(allocator, MIB)
    take(allocator, MIB - 512)
    assert take(allocator, 512) == 2 * MIB - 512
    assert allocator.reserved_bytes == 2 * MIB


def test_medium_requests_when_taken_then_share_a_segment_of_20_mib() -> None:
    allocator = NativeAllocator()
    assert take(allocator, 9 * MIB) == 0
    assert take(allocator, 9 * MIB) == 9 * MIB  # the rest of the first is 11 MiB
    assert allocator.reserved_bytes == 20 * MIB
    take(allocator, 2 * MIB)  # 2 MiB are left
    assert allocator.reserved_bytes == 20 * MIB
    take(allocator, MIB + 512)
    assert allocator.reserved_bytes == 40 * MIB


def test_rest_when_not_above_1_mib_then_stays_with_the_block() -> None:
    allocator = NativeAllocator()
    take(allocator, 9 * MIB)
    take(allocator, 10 * MIB)  # of the 11 MiB that are left: exactly 1 MiB more than it needs
    assert allocator.allocated_bytes == 20 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_rest_when_above_1_mib_then_cut_off() -> None:
    allocator = NativeAllocator()
    take(allocator, 9 * MIB)
    take(allocator, 10 * MIB - 512)
    assert allocator.allocated_bytes == 19 * MIB - 512


def test_large_requests_when_taken_then_have_segments_of_whole_2_mib() -> None:
    allocator = NativeAllocator()
    take(allocator, 33 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (34 * MIB, 34 * MIB)


def test_free_blocks_when_several_fit_then_the_smallest_and_lowest() -> None:
    allocator = NativeAllocator()
    first, big, second = (take(allocator, nbytes * MIB) for nbytes in (20, 40, 20))
    for address in (second, big, first):
        allocator.give(address)
    assert take(allocator, 20 * MIB) == first
    assert take(allocator, 20 * MIB) == second
    assert take(allocator, 20 * MIB) == big  # cut: 20 MiB are left
    assert take(allocator, 20 * MIB) == big + 20 * MIB
    assert allocator.reserved_bytes == 80 * MIB


def test_neighbours_when_given_then_merge_on_both_sides() -> None:
    allocator = NativeAllocator()
    a, b, c = (take(allocator, 6 * MIB) for _ in range(3))
    for address in (a, c, b):
        allocator.give(address)
    assert take(allocator, 20 * MIB) == a
    assert allocator.reserved_bytes == 20 * MIB


def test_blocks_when_of_another_stream_or_pool_then_not_used() -> None:
    allocator = NativeAllocator()
    allocator.give(take(allocator, 20 * MIB))
    take(allocator, 20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB
    take(allocator, 100)  # small: not cut from the free large block
    assert allocator.reserved_bytes == 42 * MIB


def test_budget_when_reached_then_free_segments_go_back_first() -> None:
    allocator = NativeAllocator(budget_bytes=60 * MIB)
    kept, gone = take(allocator, 20 * MIB), take(allocator, 30 * MIB)
    allocator.give(gone)
    assert take(allocator, 40 * MIB) == kept + 20 * MIB  # where the other was
    assert allocator.reserved_bytes == 60 * MIB


def test_budget_when_segments_are_cut_then_out_of_memory() -> None:
    allocator = NativeAllocator(budget_bytes=40 * MIB)
    blocks = [take(allocator, 5 * MIB) for _ in range(8)]
    for address in blocks[::2]:
        allocator.give(address)
    assert allocator.take(6 * MIB) is None  # 20 MiB are free, in four pieces
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (40 * MIB, 20 * MIB)
    assert allocator.take(5 * MIB) == blocks[0]


def test_addresses_when_given_then_the_lowest_are_used_again() -> None:
    addresses = DeviceAddresses()
    assert [addresses.take(nbytes) for nbytes in (10, 20, 30, 5)] == [0, 10, 30, 60]
    addresses.give(30, 30)
    addresses.give(10, 20)
    assert addresses.take(50) == 10
    addresses.give(60, 5)
    assert addresses.take(7) == 60


REQUESTS = st.sampled_from(
    [1, 600, 70_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB, 41 * MIB]
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.booleans(), REQUESTS, st.integers(0, 1)), max_size=80),
    st.one_of(st.none(), st.integers(30, 200)),
)
def test_model_when_compared_with_a_plain_twin_then_the_same(
    moves: list[tuple[bool, int, int]], budget: int | None
) -> None:
    budget_bytes = None if budget is None else budget * MIB
    fast, plain = NativeAllocator(budget_bytes=budget_bytes), PlainNative(budget_bytes=budget_bytes)
    in_use: list[int] = []
    for is_give, nbytes, stream in moves:
        if is_give and in_use:
            address = in_use.pop(nbytes % len(in_use))
            fast.give(address)
            plain.give(address)
        else:
            found = fast.take(nbytes, stream)
            assert found == plain.take(nbytes, stream)
            in_use += [] if found is None else [found]
        assert fast.reserved_bytes == plain.reserved_bytes
        assert fast.allocated_bytes == plain.allocated_bytes
