"""Pool and Ring: what they answer, and what they say when misused."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from swapkit._native.backend import Backend, CopyKind
from swapkit._native.pool import BlockState, Pool, Ring, RingKind, set_tag
from swapkit.errors import InvalidArgument, OutOfDeviceMemory, OverBudget
from tests.support.instruments import Instrument
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10
MIB = 1 << 20
BUDGET = 8 * MIB


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend.cpu(capacity_bytes=256 * MIB) as opened:
        yield opened


@pytest.fixture
def pool(backend: Backend) -> Iterator[Pool]:
    with Pool(backend, budget_bytes=BUDGET) as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["ranges", "whole segments"])
def either_pool(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(backend, budget_bytes=BUDGET, whole_segments=request.param) as opened:
        yield opened


def test_take_when_it_fits_then_memory_can_be_written(either_pool: Pool) -> None:
    address = either_pool.take(100_000)
    ctypes.memset(address, 7, 100_000)
    assert ctypes.string_at(address, 100_000) == b"\x07" * 100_000
    either_pool.give(address)


@pytest.mark.parametrize("nbytes", [0, 1 << 60, 2**64 - 1])
def test_take_when_size_is_impossible_then_invalid_argument(pool: Pool, nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{nbytes} bytes: expected 1 to "):
        pool.take(nbytes)


def test_take_when_over_budget_then_error_has_the_figures(either_pool: Pool) -> None:
    held = either_pool.take(6 * MIB)
    with pytest.raises(OverBudget) as caught:
        either_pool.take(4 * MIB)
    text = str(caught.value)
    for figure in (4 * MIB, 6 * MIB, BUDGET):
        assert str(figure) in text
    assert isinstance(caught.value, MemoryError)
    either_pool.give(held)


def test_take_when_device_is_full_then_out_of_device_memory(backend: Backend) -> None:
    with Pool(backend) as pool, pytest.raises(OutOfDeviceMemory, match=str(300 * MIB)):
        pool.take(300 * MIB)


def test_give_when_address_is_unknown_then_invalid_argument(pool: Pool) -> None:
    address = pool.take(KIB)
    with pytest.raises(InvalidArgument, match="no block in use begins at"):
        pool.give(address + 512)
    pool.give(address)
    with pytest.raises(InvalidArgument, match="no block in use begins at"):
        pool.give(address)


def test_use_when_address_is_unknown_then_invalid_argument(backend: Backend, pool: Pool) -> None:
    with pytest.raises(InvalidArgument, match="no block in use begins at"):
        pool.use(4096, backend.stream())


def test_stats_when_blocks_come_and_go_then_torch_keys_follow(pool: Pool) -> None:
    small, large = pool.take(1000), pool.take(2 * MIB)
    stats = pool.stats()
    assert stats["allocated_bytes.all.current"] == 1024 + 2 * MIB
    assert stats["allocated_bytes.small_pool.current"] == 1024
    assert stats["allocated_bytes.large_pool.current"] == 2 * MIB
    assert stats["requested_bytes.all.current"] == 1000 + 2 * MIB
    assert stats["allocation.all.current"] == 2
    assert pool.in_use_bytes() == 1024 + 2 * MIB
    pool.give(small)
    pool.give(large)
    stats = pool.stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["allocated_bytes.all.peak"] == 1024 + 2 * MIB
    assert stats["allocated_bytes.all.freed"] == 1024 + 2 * MIB
    assert pool.budget_bytes == stats["budget_bytes"] == BUDGET
    pool.reset_peak()
    assert pool.stats()["allocated_bytes.all.peak"] == 0


def test_peak_take_when_called_twice_then_second_starts_anew(pool: Pool) -> None:
    pool.give(pool.take(6 * MIB))
    pool.trim()
    assert pool.peak_take() == 6 * MIB
    assert pool.peak_take() == 0


def test_trim_when_nothing_is_in_use_then_nothing_is_reserved(either_pool: Pool) -> None:
    for address in [either_pool.take(nbytes) for nbytes in (KIB, MIB, 3 * MIB)]:
        either_pool.give(address)
    either_pool.trim()
    assert either_pool.stats()["reserved_bytes.all.current"] == 0


def test_set_budget_when_more_is_in_use_then_refused_and_unchanged(either_pool: Pool) -> None:
    address = either_pool.take(5 * MIB)
    with pytest.raises(OverBudget, match="still reserved"):
        either_pool.set_budget(4 * MIB)
    assert either_pool.budget_bytes == BUDGET
    either_pool.give(address)
    either_pool.set_budget(4 * MIB)
    with pytest.raises(OverBudget):
        either_pool.take(5 * MIB)


def test_set_budget_when_zero_then_none(pool: Pool) -> None:
    pool.set_budget(0)
    assert pool.budget_bytes == 0
    pool.give(pool.take(2 * BUDGET))


def test_blocks_when_taken_then_described(pool: Pool) -> None:
    set_tag(0)  # another test of this process may have left one
    assert set_tag(42) == 0
    address = pool.take(1000)
    assert set_tag(0) == 42
    (block,) = [each for each in pool.blocks() if each.state is BlockState.IN_USE]
    assert (block.address, block.nbytes, block.requested_bytes) == (address, 1024, 1000)
    assert block.tag == 42
    assert pool.owns(address)
    assert pool.owns(address + 1023)
    assert not pool.owns(id(pool))
    (segment,) = pool.segments()
    assert segment.committed_bytes == pool.stats()["reserved_bytes.all.current"]
    pool.give(address)


def test_use_when_copy_is_pending_then_block_waits(backend: Backend) -> None:
    with Instrument.delay(Backend.cpu(capacity_bytes=64 * MIB)) as gated:
        pool, stream = Pool(gated), gated.stream()
        host = ctypes.create_string_buffer(KIB)
        address = pool.take(KIB)
        pool.use(address, stream)
        gated.copy(
            to=ctypes.addressof(host),
            source=address,
            nbytes=KIB,
            kind=CopyKind.DEVICE_TO_HOST,
            stream=stream,
        )
        pool.give(address)
        states = {block.address: block.state for block in pool.blocks()}
        assert states[address] is BlockState.PENDING
        other = pool.take(KIB)
        assert other != address
        gated.release_copies()
        stream.synchronize()
        assert pool.take(KIB) == address
        pool.give(address)
        pool.give(other)
        pool.close()
    assert backend.memory_info().free_bytes == 256 * MIB


def test_rescue_when_it_frees_enough_then_take_succeeds(either_pool: Pool) -> None:
    held = [either_pool.take(2 * MIB) for _ in range(4)]
    asked: list[int] = []

    def free_one(needed_bytes: int) -> int:
        asked.append(needed_bytes)
        either_pool.give(held.pop())
        return 2 * MIB

    either_pool.set_rescue(free_one)
    address = either_pool.take(2 * MIB)
    assert len(asked) == 1
    stats = either_pool.stats()
    assert (stats["num_rescues"], stats["rescued_bytes"]) == (1, 2 * MIB)
    either_pool.set_rescue(None)
    for each in (*held, address):
        either_pool.give(each)


def test_rescue_when_it_raises_then_logged_and_take_fails(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    held = pool.take(BUDGET)

    def fail(needed_bytes: int) -> int:
        message = f"no idea where {needed_bytes} bytes should come from"
        raise RuntimeError(message)

    pool.set_rescue(fail)
    with caplog.at_level(logging.ERROR), pytest.raises(OverBudget):
        pool.take(KIB)
    assert "a native callback of" in caplog.text
    assert "no idea where" in caplog.text
    pool.set_rescue(None)
    pool.give(held)


def test_rescue_when_removed_then_not_called(pool: Pool) -> None:
    held = pool.take(BUDGET)
    pool.set_rescue(lambda _: pytest.fail("called"))
    pool.set_rescue(None)
    with pytest.raises(OverBudget):
        pool.take(KIB)
    pool.give(held)


def test_rescue_when_it_takes_itself_then_no_recursion(pool: Pool) -> None:
    held = [pool.take(4 * MIB), pool.take(4 * MIB)]
    depths: list[int] = []

    def free_one(_: int) -> int:
        depths.append(len(depths))
        with pytest.raises(OverBudget):
            pool.take(KIB)
        if not held:
            return 0
        pool.give(held.pop())
        return 4 * MIB

    pool.set_rescue(free_one)
    held.append(pool.take(MIB))
    assert depths == [0]
    pool.set_rescue(None)
    for each in held:
        pool.give(each)


def test_rescue_when_called_from_a_thread_then_runs_there(pool: Pool) -> None:
    held = [pool.take(BUDGET)]
    names: list[str] = []

    def free(_: int) -> int:
        names.append(threading.current_thread().name)
        pool.give(held.pop())
        return BUDGET

    pool.set_rescue(free)
    on_thread(lambda: pool.give(pool.take(KIB)), name="taker")
    assert names == ["taker"]
    pool.set_rescue(None)


def test_close_when_blocks_are_in_use_then_refused_and_pool_still_works(pool: Pool) -> None:
    address = pool.take(KIB)
    with pytest.raises(InvalidArgument, match="1 blocks are in use"):
        pool.close()
    assert not pool.closed
    pool.give(address)
    pool.close()
    assert pool.closed
    pool.close()


def test_pool_when_closed_then_every_use_is_refused(backend: Backend) -> None:
    pool = Pool(backend)
    pool.close()
    uses = (
        lambda: pool.take(1),
        lambda: pool.give(1),
        lambda: pool.use(1, None),
        lambda: pool.set_budget(1),
        lambda: pool.set_rescue(None),
        lambda: pool.owns(1),
        pool.trim,
        pool.stats,
        pool.reset_peak,
        pool.peak_take,
        pool.blocks,
        pool.segments,
        pool.check,
    )
    for use in uses:
        with pytest.raises(InvalidArgument, match="pool is closed"):
            use()


def test_pool_when_backend_is_closed_then_invalid_argument() -> None:
    backend = Backend.cpu(capacity_bytes=MIB)
    backend.close()
    with pytest.raises(InvalidArgument, match="backend is closed"):
        Pool(backend)


def test_take_when_stream_is_closed_then_invalid_argument(backend: Backend, pool: Pool) -> None:
    stream = backend.stream()
    stream.close()
    with pytest.raises(InvalidArgument, match="stream is closed"):
        pool.take(KIB, stream)


def test_trim_when_stream_was_dropped_then_pool_kept_it(backend: Backend, pool: Pool) -> None:
    stream = backend.stream()
    alive = weakref.ref(stream)
    pool.give(pool.take(KIB, stream))
    address = pool.take(KIB)
    pool.use(address, backend.stream())
    pool.give(address)
    del stream
    gc.collect()
    assert alive() is not None  # the pool still waits for its work
    pool.trim()
    pool.close()


def test_close_when_pool_knows_the_stream_then_refused_until_pool_is_closed(
    backend: Backend, pool: Pool
) -> None:
    stream = backend.stream()
    pool.give(pool.take(KIB, stream))
    with pytest.raises(InvalidArgument, match="pool"):
        stream.close()
    pool.trim()
    pool.close()
    stream.close()
    assert stream.closed


def test_ring_when_attached_then_events_are_recorded_in_order(pool: Pool) -> None:
    with Ring(16) as ring:
        pool.attach(ring)
        pool.give(pool.take(2 * MIB))
        pool.note(RingKind.MARK, 5)
        pool.detach()
        pool.give(pool.take(2 * MIB))
        pool.note(RingKind.MARK, 6)
        events, lost = ring.read()
        assert lost == 0
        assert [event.kind for event in events] == [RingKind.TAKE, RingKind.GIVE, RingKind.MARK]
        assert [event.nbytes for event in events] == [2 * MIB, 2 * MIB, 5]
        assert [event.in_use_bytes for event in events] == [2 * MIB, 0, 0]
        assert ring.read() == ([], 0)


def test_ring_when_overfull_then_oldest_are_lost(pool: Pool) -> None:
    with Ring(8) as ring:
        pool.attach(ring)
        for number in range(20):
            pool.note(RingKind.MARK, number)
        events, lost = ring.read()
        assert lost == 12
        assert [event.nbytes for event in events] == list(range(12, 20))
        pool.detach()


def test_ring_when_capacity_is_zero_then_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="capacity of 0"):
        Ring(0)


def test_ring_when_closed_then_refused(pool: Pool) -> None:
    ring = Ring(8)
    ring.close()
    with pytest.raises(InvalidArgument, match="ring is closed"):
        pool.attach(ring)


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({"max_split_bytes": 20 * MIB}, "expected more than 20971520"),
        ({"garbage_collection_threshold": 1.0}, "0 to below 1"),
        ({"garbage_collection_threshold": -0.5}, "0 to below 1"),
        ({"roundup_divisions": [1, 3]}, r"roundup_divisions\[1\]=3: expected a power of 2"),
    ],
)
def test_pool_when_a_setting_is_out_of_range_then_invalid_argument(
    backend: Backend, settings: dict[str, Any], accepted: str
) -> None:
    with pytest.raises(InvalidArgument, match=accepted):
        Pool(backend, **settings)
