"""Storages: parts of them, those that others hold, addresses that come again; and their end."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._native.sched import State
from swapkit._runtime.shim.types import Placement
from swapkit.ir.plans import Action
from tests.support import MIB
from tests.support.threads import on_threads
from tests.unit._runtime.rig import (
    AUTO,
    EVERYTHING,
    KEEP,
    SWAP,
    evict,
    group_of,
    in_use,
    interrupts,
    make_swapper,
    numbers,
    save,
    settle,
    state_of,
    unpack,
)

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import SavedTensor

pytestmark = pytest.mark.usefixtures("installation")


# ---- views of a large storage -------------------------------------------------------------------


def test_part_when_a_small_view_is_saved_then_it_moves_and_the_whole_storage_is_free(
    installation: Installation,
) -> None:
    swapper = make_swapper()
    before = in_use(installation)
    base = numbers(8 * MIB)
    view = base[1000:3000:2]
    expected = view.clone()
    handle = save(swapper, view)
    del base, view
    assert swapper.rescue_bytes(1) == 8 * MIB
    assert in_use(installation) <= before + 4096  # `expected`
    assert swapper.scheduler.stats().copied_out_bytes < 9000
    unpacked = unpack(swapper, handle)
    assert torch.equal(unpacked, expected)
    assert unpacked.stride() == (2,)


def test_part_when_chunks_of_one_storage_are_saved_then_one_copy_of_all() -> None:
    swapper = make_swapper()
    fused = numbers(3 * MIB)
    expected = [chunk.clone() for chunk in fused.chunk(3)]
    handles = [save(swapper, chunk, SWAP) for chunk in fused.chunk(3)]
    assert len({id(handle.group) for handle in handles}) == 1
    del fused
    settle(swapper)
    assert state_of(handles[0]) == State.OUT
    assert swapper.scheduler.stats().copied_out_bytes == 3 * MIB
    for handle, chunk in zip(handles, expected, strict=True):
        assert torch.equal(unpack(swapper, handle), chunk)
    assert swapper.scheduler.stats().copied_in_bytes == 3 * MIB


def test_part_when_a_view_beyond_its_copy_is_saved_then_that_has_a_group_of_its_own() -> None:
    swapper = make_swapper()
    base = numbers(MIB)
    inner = save(swapper, base[1000:2000])
    assert swapper.mover.copy_out(group_of(inner))
    whole, within = save(swapper, base), save(swapper, base[1500:1600])
    assert whole.group is not inner.group
    assert within.group in {inner.group, whole.group}
    expected = base.clone()
    del base
    evict(swapper, inner, whole, within)
    assert torch.equal(unpack(swapper, whole), expected)
    assert torch.equal(unpack(swapper, inner), expected[1000:2000])
    assert torch.equal(unpack(swapper, within), expected[1500:1600])


def test_part_when_given_up_again_while_a_user_holds_it_then_its_offsets_stay() -> None:
    swapper = make_swapper()
    base = torch.arange(1 << 16, dtype=torch.float32)
    handle = save(swapper, base[4096:12288])
    evict(swapper, handle)
    del base
    held = unpack(swapper, handle)
    expected = held.clone()
    evict(swapper, handle)
    again = unpack(swapper, handle)
    assert again.storage_offset() == held.storage_offset()
    assert torch.equal(again, expected)


def test_part_when_views_of_it_are_saved_again_then_they_come_back_right() -> None:
    swapper = make_swapper()
    base = torch.arange(1 << 16, dtype=torch.float32)
    first = save(swapper, base[64:16384])
    evict(swapper, first)
    del base
    views = [unpack(swapper, first)[at : at + 512] for at in (0, 16, 4096, 15000)]
    expected = [view.clone() for view in views]
    handles = [save(swapper, view) for view in views]
    del views
    evict(swapper, *handles)
    for handle, view in zip(handles, expected, strict=True):
        assert torch.equal(unpack(swapper, handle), view)


# ---- storages that others hold, and addresses that come again -----------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_storage_when_somebody_else_kept_it_then_nothing_is_copied_back(early: bool) -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    handle = save(swapper, tensor)
    evict(swapper, handle)
    assert handle.is_stripped
    if early:
        assert swapper.mover.bring_early(group_of(handle))
    assert unpack(swapper, handle).data_ptr() == tensor.data_ptr()
    assert swapper.scheduler.stats().copied_in_bytes == 0
    assert save(swapper, tensor[1:]).group is handle.group
    del tensor
    evict(swapper, handle)
    assert torch.equal(unpack(swapper, handle), numbers(4096))
    assert swapper.scheduler.stats().copied_in_bytes == 4096


def test_storage_when_given_up_but_saved_again_then_it_joins_its_group() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    handle = save(swapper, tensor)
    evict(swapper, handle)
    assert save(swapper, tensor[5:]).group is handle.group
    assert state_of(handle) == State.CLEAN
    assert handle.group in swapper.mover.resident


def test_address_when_it_comes_again_then_the_new_storage_has_its_own_group() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    address = tensor.untyped_storage()._cdata
    handle = save(swapper, tensor)
    evict(swapper, handle)
    del tensor
    assert torch.equal(unpack(swapper, handle), numbers(4096))  # from now on it is elsewhere
    others: list[torch.Tensor] = []
    while len(others) < 2000 and (not others or others[-1].untyped_storage()._cdata != address):
        others.append(torch.full((1024,), float(len(others))))
    recycled = save(swapper, others[-1])
    assert recycled.group is not handle.group
    evict(swapper, recycled)
    assert torch.equal(unpack(swapper, recycled), others[-1])


# ---- leaks, threads, interruptions --------------------------------------------------------------


def test_graphs_when_dropped_at_random_for_a_thousand_steps_then_nothing_is_left(
    installation: Installation,
) -> None:
    chance = random.Random(7)
    swapper = make_swapper()
    before = in_use(installation)
    alive: list[list[object]] = []
    for step in range(1000):
        choice = chance.choice([AUTO, SWAP, KEEP, Placement(Action.SWAP, prefetch=2)])
        handles = [save(swapper, chance.choice([2048, 65536]), choice) for _ in range(3)]
        if chance.random() < 0.3:
            swapper.rescue_bytes(1 if step % 20 else EVERYTHING)
        if chance.random() < 0.5:
            unpack(swapper, chance.choice(handles))
        alive.append([handles])
        while len(alive) > chance.randrange(4):
            alive.pop(chance.randrange(len(alive)))
        if step % 10 == 0:
            swapper.end_step()
    del handles
    alive.clear()
    settle(swapper)
    swapper.end_step()
    stats = swapper.scheduler.stats()
    assert in_use(installation) == before
    assert stats.host_bytes == stats.disk_bytes == stats.groups == stats.in_flight == 0
    assert swapper.mover.indexed_count == 0
    assert swapper.mover.out == []
    assert swapper.mover.dirty_count == 0
    swapper.scheduler.check()


def test_pack_and_unpack_when_many_threads_do_both_then_everyone_gets_their_own() -> None:
    swapper = make_swapper(limit_bytes=1)
    failures: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        for turn in range(60):
            seed = 1000 * number + turn
            handle = save(swapper, 65536, chance.choice([AUTO, SWAP]), seed=seed)
            if chance.random() < 0.5:
                swapper.rescue_bytes(chance.choice([1, EVERYTHING]))
            if not torch.equal(unpack(swapper, handle), numbers(65536, seed)):
                failures.append(f"{number}, {turn}")

    on_threads(*[partial(work, number) for number in range(4)])
    assert failures == []
    swapper.scheduler.check()


def away_and_back(swapper: Swapper, handle: SavedTensor) -> None:
    swapper.rescue_bytes(EVERYTHING)
    unpack(swapper, handle)


@pytest.mark.parametrize("choice", [AUTO, SWAP], ids=["auto", "swap"])
def test_life_when_interrupted_anywhere_then_the_tensor_comes_back_whole(
    choice: Placement, installation: Installation
) -> None:
    swapper = make_swapper(limit_bytes=1)
    before = in_use(installation)
    interruptions = 0
    for nth in range(1, 400):
        handle = save(swapper, 8192, choice, seed=nth)
        if not interrupts(nth, partial(away_and_back, swapper, handle)):
            break
        interruptions += 1
        assert torch.equal(unpack(swapper, handle), numbers(8192, nth))
        evict(swapper, handle)
        assert torch.equal(unpack(swapper, handle), numbers(8192, nth))
    assert interruptions > 10  # in rescue, and where the hooks ask what to do
    del handle
    settle(swapper)
    assert in_use(installation) == before
    assert swapper.scheduler.stats().host_bytes == 0
