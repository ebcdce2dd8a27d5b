"""What is evicted and in which order, and what is copied ahead of the need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._native.backend import Backend
from swapkit._native.sched import State
from swapkit._runtime.saved.eviction import COPIES_IN_FLIGHT
from tests.support import MIB, limit_above_reserved
from tests.support.instruments import Instrument
from tests.unit._runtime.rig import (
    EVERYTHING,
    KEEP,
    SWAP,
    evict,
    group_of,
    in_use,
    make_swapper,
    numbers,
    save,
    settle,
    state_of,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import SavedTensor

pytestmark = pytest.mark.usefixtures("installation")


def copy_out(swapper: Swapper, *handles: SavedTensor) -> None:
    """Make groups clean."""
    for handle in handles:
        assert swapper.mover.copy_out(group_of(handle))
        assert swapper.mover.finish_out(group_of(handle))
    settle(swapper)


# ---- rescue ------------------------------------------------------------------------------------


@pytest.mark.promise("A4")
@pytest.mark.parametrize("copied", [False, True])
def test_rescue_when_it_says_that_bytes_are_free_then_they_are(
    installation: Installation, copied: bool
) -> None:
    swapper = make_swapper(limit_bytes=1 if copied else EVERYTHING)
    before = in_use(installation)
    handle = save(swapper, 4 * MIB)
    assert swapper.rescue_bytes(1) == 4 * MIB
    assert in_use(installation) == before
    assert state_of(handle) == State.OUT
    assert swapper.counters().rescues == 1


def test_rescue_when_others_hold_the_storage_then_it_stays() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    handle = save(swapper, tensor)
    assert swapper.rescue_bytes(EVERYTHING) == swapper.counters().rescues == 0
    assert state_of(handle) == State.RESIDENT
    assert tensor.numel() == 1024


def test_rescue_when_a_part_is_enough_then_the_oldest_go_first() -> None:
    swapper = make_swapper()
    handles = [save(swapper, MIB, seed=seed) for seed in range(4)]
    assert swapper.rescue_bytes(2 * MIB) == 2 * MIB
    out, resident = State.OUT, State.RESIDENT
    assert [state_of(handle) for handle in handles] == [out, out, resident, resident]
    assert sum(swapper.resident_sizes()) == 2 * MIB


def test_rescue_when_some_are_clean_then_they_go_before_older_ones() -> None:
    swapper = make_swapper()
    handles = [save(swapper, MIB, seed=seed) for seed in range(3)]
    copy_out(swapper, handles[2])
    assert swapper.rescue_bytes(MIB) == MIB
    assert [state_of(handle) for handle in handles] == [State.RESIDENT, State.RESIDENT, State.OUT]
    assert swapper.scheduler.stats().copied_out_bytes == MIB


def test_rescue_when_a_copy_still_runs_then_its_group_is_not_clean() -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    handle = save(swapper, MIB)
    group = group_of(handle)
    assert swapper.mover.copy_out(group)
    assert swapper.evictor._evict_clean([group], 1) == 0
    assert state_of(handle) == State.COPYING_OUT
    slow.release_copies()
    assert swapper.rescue_bytes(1) == MIB
    assert torch.equal(unpack(swapper, handle), numbers(MIB))


def test_rescue_when_one_clean_group_just_fits_then_it_is_taken_alone() -> None:
    swapper = make_swapper()
    handles = [save(swapper, nbytes) for nbytes in (MIB, 8 * MIB, 3 * MIB)]
    copy_out(swapper, *handles)
    assert swapper.rescue_bytes(5 * MIB // 2) == 3 * MIB
    assert [state_of(handle) for handle in handles] == [State.CLEAN, State.CLEAN, State.OUT]


def test_rescue_when_a_group_came_back_then_evicting_it_again_copies_nothing() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    for _ in range(3):
        assert swapper.rescue_bytes(1) == 4096
        assert torch.equal(unpack(swapper, handle), numbers(4096))
    assert swapper.scheduler.stats().copied_out_bytes == 4096
    assert swapper.scheduler.stats().copied_in_bytes == 3 * 4096


def test_rescue_when_a_group_is_on_its_way_back_then_it_goes_last() -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    first, second = save(swapper, MIB), save(swapper, MIB, seed=1)
    slow.release_copies(1)
    evict(swapper, first)
    assert swapper.mover.bring_early(group_of(first))
    assert state_of(first) == State.COPYING_IN
    slow.release_copies()
    assert swapper.rescue_bytes(1) == MIB
    assert state_of(second) == State.OUT
    assert swapper.rescue_bytes(1) == MIB
    assert state_of(first) == State.OUT
    assert torch.equal(unpack(swapper, first), numbers(MIB))


def test_rescue_when_the_host_is_full_then_what_was_copied_still_counts() -> None:
    swapper = make_swapper(host_limit_bytes=3 * MIB)
    handles = [save(swapper, 2 * MIB, seed=seed) for seed in range(2)]
    assert swapper.rescue_bytes(EVERYTHING) == 2 * MIB
    assert swapper.mover.host_is_full
    assert [state_of(handle) for handle in handles] == [State.OUT, State.RESIDENT]
    assert torch.equal(unpack(swapper, handles[1]), numbers(2 * MIB, 1))
    swapper.end_step()
    assert not swapper.mover.host_is_full


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_rescue_when_a_grad_mode_is_on_then_the_tensor_comes_back_whole(
    mode: Callable[[], Any],
) -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    with mode():
        assert swapper.rescue_bytes(1) == 4096
    unpacked = unpack(swapper, handle)
    assert torch.equal(unpacked, numbers(4096))
    assert not unpacked.is_inference()


def test_rescue_when_a_functional_transform_runs_then_the_tensor_comes_back_whole() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)

    def loss(x: torch.Tensor) -> torch.Tensor:
        assert swapper.rescue_bytes(1) == 4096
        return x.square().sum()

    torch.func.grad(loss)(torch.ones(3))
    # The view over nothing is a plain tensor: one of the transform would crash the process later.
    assert not torch._C._functorch.is_functorch_wrapped_tensor(handle.alias)
    handle.alias.untyped_storage()
    assert torch.equal(unpack(swapper, handle), numbers(4096))


@pytest.mark.promise("A15")
def test_rescue_when_a_multiple_is_asked_for_then_so_many_times_the_bytes_go() -> None:
    swapper = make_swapper(limit_bytes=EVERYTHING, multiple=3)
    swapper.evictor._least_bytes = 0
    handles = [save(swapper, MIB, seed=seed) for seed in range(8)]
    assert swapper.rescue_bytes(MIB) == 3 * MIB
    assert swapper.rescue_bytes(4 * MIB) == 5 * MIB  # all there is
    assert {state_of(handle) for handle in handles} == {State.OUT}


@pytest.mark.parametrize("choice", [KEEP, SWAP], ids=["keep", "swap"])
def test_rescue_of_everything_when_kept_then_stays_and_when_swapped_then_goes(
    choice: Any,
) -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096, choice)
    swapper.rescue_bytes(EVERYTHING)
    if choice is KEEP:
        assert handle.group is None
        assert not handle.is_stripped
        assert torch.equal(handle.alias, numbers(4096))
    else:
        assert state_of(handle) == State.OUT


def test_handle_when_the_graph_is_dropped_then_device_and_host_memory_go(
    installation: Installation,
) -> None:
    swapper = make_swapper()
    before = in_use(installation)
    handles = [save(swapper, MIB, seed=seed) for seed in range(2)]
    swapper.rescue_bytes(MIB)
    del handles
    settle(swapper)
    assert in_use(installation) == before
    assert swapper.scheduler.stats().host_bytes == 0
    assert swapper.mover.resident == []
    assert swapper.mover.indexed_count == 0


def test_rescue_when_a_dropped_graph_was_still_being_copied_then_its_memory_is_freed(
    installation: Installation,
) -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    before = in_use(installation)
    handle = save(swapper, 4 * MIB)
    assert swapper.mover.copy_out(group_of(handle))
    del handle
    assert in_use(installation) == before + 4 * MIB
    slow.release_copies()
    swapper.rescue_bytes(1)
    assert in_use(installation) == before


def test_rescue_when_it_happens_as_a_group_comes_back_then_the_others_make_room(
    installation: Installation,
) -> None:
    """A copy back allocates, and may call the rescue of the very swapper that runs."""
    with swapkit.budget(limit_above_reserved(installation, 20 * MIB)) as session:
        assert session._active is not None
        swapper = session._active.swapper
        handles = [save(swapper, 4 * MIB, seed=seed) for seed in range(8)]
        for _ in range(3):
            for seed in (0, 7, 3, 5, 1):
                assert torch.equal(unpack(swapper, handles[seed]), numbers(4 * MIB, seed))
        assert session.stats.oom_rescues > 0
        assert session.stats.peak_bytes <= session.limit_bytes


# ---- write-behind ------------------------------------------------------------------------------


def test_write_behind_when_memory_is_free_then_it_rests() -> None:
    swapper = make_swapper()
    handles = [save(swapper, MIB, seed=seed) for seed in range(3)]
    assert swapper.scheduler.stats().copied_out_bytes == 0
    assert {state_of(handle) for handle in handles} == {State.RESIDENT}


def test_write_behind_when_memory_fills_then_the_oldest_are_copied_and_stay() -> None:
    swapper = make_swapper(limit_bytes=1)
    handles = []
    for seed in range(4):
        handles.append(save(swapper, MIB, seed=seed))
        states = [state_of(handle) for handle in handles]
        assert states.count(State.COPYING_OUT) <= COPIES_IN_FLIGHT
    assert swapper.scheduler.stats().copied_out_bytes > 0
    settle(swapper)
    assert state_of(handles[0]) == State.CLEAN
    assert swapper.scheduler.stats().copied_in_bytes == 0
    assert torch.equal(unpack(swapper, handles[0]), numbers(MIB))


def test_write_behind_when_the_forward_still_holds_a_storage_then_it_waits() -> None:
    swapper = make_swapper(limit_bytes=1)
    tensor = numbers(4096)
    handle = save(swapper, tensor)
    assert state_of(handle) == State.RESIDENT
    del tensor
    kept = numbers(4096, 1)
    save(swapper, kept)
    assert state_of(handle) in {State.COPYING_OUT, State.CLEAN}


def test_write_behind_when_the_last_step_evicted_nothing_then_the_next_copies_nothing() -> None:
    swapper = make_swapper(limit_bytes=1)
    swapper.end_step()
    handles = [save(swapper, MIB, seed=seed) for seed in range(3)]
    assert swapper.scheduler.stats().copied_out_bytes == 0
    assert swapper.rescue_bytes(MIB) == MIB
    del handles
    swapper.end_step()
    handles = []
    for seed in range(5):
        handles.append(save(swapper, MIB, seed=seed))
        settle(swapper)
    copied = swapper.scheduler.stats().copied_out_bytes
    assert MIB < copied <= 3 * MIB  # 1.25 MiB ahead, in whole storages
    assert len(handles) == 5


def test_write_behind_when_graphs_are_dropped_then_its_queue_does_not_grow() -> None:
    swapper = make_swapper()
    for seed in range(200):
        save(swapper, 1024, seed=seed)
    assert swapper.mover.dirty_count < 20


# ---- standby -------------------------------------------------------------------------------------


def test_standby_when_another_thread_ends_it_as_it_is_switched_on_then_it_is_off() -> None:
    swapper = make_swapper()
    rescue = swapper.evictor
    seen: list[bool] = []

    def stand_by(is_on: bool) -> None:
        if is_on and seen:
            rescue.end_standby()  # which another thread may do here
        seen.append(is_on)

    rescue._stand_by = stand_by
    rescue.prepare_standby()
    rescue.set_standby(is_on=True)
    assert seen == [True, False, True, False]
    rescue.set_standby(is_on=True)
    assert seen[-1] is False
