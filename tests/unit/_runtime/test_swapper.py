"""What is packed, what is evicted and in which order, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.pool import Pool
from swapkit._runtime.groups import SavedTensor, State
from swapkit._runtime.session import SessionConfig
from swapkit._runtime.swapper import COPIES_IN_FLIGHT, Swapper
from swapkit._runtime.transfers import CopyEngine
from swapkit.errors import SavedTensorModified
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.installation import Installation

EVERYTHING = 1 << 50


@pytest.fixture
def make(installation: Installation) -> Callable[..., Swapper]:
    """Make a swapper; without a budget given, memory never fills up."""

    def make(
        *, budget_bytes: int = 128 * MIB, min_swap_bytes: int = 1024, host_limit_bytes: int = 0
    ) -> Swapper:
        return Swapper(
            pool=installation.pool,
            engine=CopyEngine(installation.pool, host_limit_bytes=host_limit_bytes),
            tracker=installation.tracker,
            lock=installation.lock,
            config=SessionConfig(
                limit_bytes=budget_bytes,
                host_limit_bytes=host_limit_bytes,
                min_swap_bytes=min_swap_bytes,
            ),
        )

    return make


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(nbytes // 4, generator=generator)


def saved(swapper: Swapper, nbytes: int, seed: int = 0) -> SavedTensor:
    """Save a tensor that nobody else holds."""
    return swapper.pack(numbers(nbytes, seed))


def state_of(handle: SavedTensor) -> State:
    assert handle.group is not None
    return handle.group.state


def settle(swapper: Swapper, handle: SavedTensor) -> None:
    """Let a copy out of the handle's group end."""
    assert handle.group is not None
    swapper._settle(handle.group, wait=True)


# ---- packing -----------------------------------------------------------------------------------


def test_unpack_when_nothing_happened_then_an_equal_tensor_over_the_same_storage(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    tensor = numbers(4096)
    unpacked = swapper.unpack(swapper.pack(tensor))
    assert torch.equal(unpacked, tensor)
    assert unpacked.data_ptr() == tensor.data_ptr()


def test_unpack_when_evicted_then_every_view_is_back_over_one_storage(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    base = numbers(8192).view(32, 64)
    expected = [base.clone(), base.t().clone(), base[3:, 1::2].clone()]
    handles = [swapper.pack(base), swapper.pack(base.t()), swapper.pack(base[3:, 1::2])]
    assert len({id(handle.group) for handle in handles}) == 1
    del base
    assert swapper.rescue(1) == 8192
    assert state_of(handles[0]) is State.OUT
    unpacked = [swapper.unpack(handle) for handle in handles]
    assert all(torch.equal(a, b) for a, b in zip(unpacked, expected, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in unpacked}) == 1
    assert swapper._engine.copied_out_bytes == swapper._engine.copied_in_bytes == 8192


def test_pack_when_the_version_differs_then_a_group_of_its_own(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    tensor = numbers(4096)
    first = swapper.pack(tensor)
    tensor.add_(1)
    assert swapper.pack(tensor).group is not first.group


class Subclass(torch.Tensor):
    pass


PASSING: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: numbers(1020),
    "parameter": lambda: torch.nn.Parameter(numbers(4096).view(32, 32)),
    "view of a parameter": lambda: torch.nn.Parameter(numbers(4096).view(32, 32)).t(),
    "subclass": lambda: numbers(4096).as_subclass(Subclass),
    "sparse": lambda: numbers(4096).view(32, 32).to_sparse(),
    "meta": lambda: torch.empty(4096, device="meta"),
    "inference": torch.inference_mode()(lambda: numbers(4096)),
    "not from the pool": lambda: torch.frombuffer(bytearray(4096), dtype=torch.float32),
    "quantised": lambda: torch.quantize_per_tensor(numbers(8192), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantised tensors are announced to go
@pytest.mark.parametrize("kind", PASSING)
def test_pack_when_the_tensor_is_not_for_swapping_then_it_passes(
    make: Callable[..., Swapper], kind: str
) -> None:
    swapper = make()
    tensor = PASSING[kind]()
    handle = swapper.pack(tensor)
    assert handle.group is None
    assert swapper.rescue(EVERYTHING) == 0
    unpacked = swapper.unpack(handle)
    assert unpacked.layout == tensor.layout
    assert isinstance(unpacked, Subclass) == isinstance(tensor, Subclass)
    if kind not in {"meta", "sparse"}:
        assert unpacked.data_ptr() == tensor.data_ptr()


def test_pack_when_the_least_size_is_higher_then_smaller_storages_pass(
    make: Callable[..., Swapper],
) -> None:
    swapper = make(min_swap_bytes=8192)
    assert saved(swapper, 8188).group is None
    assert saved(swapper, 8192).group is not None


@pytest.mark.parametrize("evict", [False, True])
def test_unpack_when_changed_in_place_then_refused(
    make: Callable[..., Swapper], evict: bool
) -> None:
    swapper = make()
    handle = saved(swapper, 4096)
    if evict:
        swapper.rescue(1)
    handle.alias.add_(1)  # whoever still shares the version counter
    with pytest.raises(SavedTensorModified):
        swapper.unpack(handle)


def test_unpack_when_a_small_tensor_was_changed_then_refused(make: Callable[..., Swapper]) -> None:
    swapper = make()
    tensor = numbers(64)
    handle = swapper.pack(tensor)
    tensor.zero_()
    with pytest.raises(SavedTensorModified):
        swapper.unpack(handle)


# ---- rescue ------------------------------------------------------------------------------------


@pytest.mark.promise("A4")
@pytest.mark.parametrize("copied", [False, True])
def test_rescue_when_it_says_that_bytes_are_free_then_they_are(
    make: Callable[..., Swapper], installation: Installation, copied: bool
) -> None:
    swapper = make(budget_bytes=1 if copied else EVERYTHING)
    handle = saved(swapper, 4 * MIB)
    before = installation.pool.in_use_bytes()
    assert swapper.rescue(1) == 4 * MIB
    assert installation.pool.in_use_bytes() == before - 4 * MIB
    assert state_of(handle) is State.OUT
    assert swapper.rescues == 1


def test_rescue_when_others_hold_the_storage_then_it_stays(make: Callable[..., Swapper]) -> None:
    swapper = make()
    tensor = numbers(4096)
    handle = swapper.pack(tensor)
    assert swapper.rescue(EVERYTHING) == swapper.rescues == 0
    assert state_of(handle) is State.RESIDENT
    assert tensor.numel() == 1024


def test_rescue_when_a_part_is_enough_then_the_oldest_go_first(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    handles = [saved(swapper, MIB, seed) for seed in range(4)]
    assert swapper.rescue(2 * MIB) == 2 * MIB
    out, resident = State.OUT, State.RESIDENT
    assert [state_of(handle) for handle in handles] == [out, out, resident, resident]
    assert swapper.resident_bytes() == 2 * MIB


def test_rescue_when_some_are_clean_then_they_go_before_older_ones(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    handles = [saved(swapper, MIB, seed) for seed in range(3)]
    group = handles[2].group
    assert group is not None
    assert swapper._copy_out(group)
    settle(swapper, handles[2])
    copied_bytes = swapper._engine.copied_out_bytes
    assert swapper.rescue(MIB) == MIB
    assert [state_of(handle) for handle in handles] == [State.RESIDENT, State.RESIDENT, State.OUT]
    assert swapper._engine.copied_out_bytes == copied_bytes


def test_rescue_when_a_copy_still_runs_then_its_group_is_not_clean(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    handle = saved(swapper, MIB)
    slow = Backend.delay(Backend.cpu())
    swapper._engine = CopyEngine(Pool(slow), host_limit_bytes=0)
    assert handle.group is not None
    assert swapper._copy_out(handle.group)
    assert swapper._evict_clean([handle.group], 1) == 0
    assert state_of(handle) is State.COPYING_OUT
    slow.release_copies()
    assert swapper.rescue(1) == MIB
    assert torch.equal(swapper.unpack(handle), numbers(MIB))


def test_rescue_when_one_clean_group_just_fits_then_it_is_taken_alone(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    handles = [saved(swapper, nbytes) for nbytes in (MIB, 8 * MIB, 3 * MIB)]
    for handle in handles:
        assert handle.group is not None
        assert swapper._copy_out(handle.group)
        settle(swapper, handle)
    swapper._engine.poll()
    assert swapper.rescue(5 * MIB // 2) == 3 * MIB
    assert [state_of(handle) for handle in handles] == [State.CLEAN, State.CLEAN, State.OUT]


def test_rescue_when_a_group_came_back_then_evicting_it_again_copies_nothing(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    expected = numbers(4096)
    handle = saved(swapper, 4096)
    for _ in range(3):
        assert swapper.rescue(1) == 4096
        assert torch.equal(swapper.unpack(handle), expected)
    assert swapper._engine.copied_out_bytes == 4096
    assert swapper._engine.copied_in_bytes == 3 * 4096


def test_rescue_when_the_host_is_full_then_what_was_copied_still_counts(
    make: Callable[..., Swapper],
) -> None:
    swapper = make(host_limit_bytes=3 * MIB)
    handles = [saved(swapper, 2 * MIB, seed) for seed in range(2)]
    assert swapper.rescue(EVERYTHING) == 2 * MIB
    assert swapper.host_is_full
    assert [state_of(handle) for handle in handles] == [State.OUT, State.RESIDENT]
    assert torch.equal(swapper.unpack(handles[1]), numbers(2 * MIB, 1))
    swapper.end_step()
    assert not swapper.host_is_full


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_rescue_when_a_grad_mode_is_on_then_the_tensor_comes_back_whole(
    make: Callable[..., Swapper], mode: Callable[[], Any]
) -> None:
    swapper = make()
    handle = saved(swapper, 4096)
    with mode():
        assert swapper.rescue(1) == 4096
    unpacked = swapper.unpack(handle)
    assert torch.equal(unpacked, numbers(4096))
    assert not unpacked.is_inference()


def test_rescue_when_a_functional_transform_runs_then_the_tensor_comes_back_whole(
    make: Callable[..., Swapper],
) -> None:
    swapper = make()
    handle = saved(swapper, 4096)

    def loss(x: torch.Tensor) -> torch.Tensor:
        assert swapper.rescue(1) == 4096
        return x.square().sum()

    torch.func.grad(loss)(torch.ones(3))
    # The view over nothing is a plain tensor: one of the transform would crash the process later.
    assert not torch._C._functorch.is_functorch_wrapped_tensor(handle.alias)
    handle.alias.untyped_storage()
    assert torch.equal(swapper.unpack(handle), numbers(4096))


def test_handle_when_the_graph_is_dropped_then_device_and_host_memory_go(
    make: Callable[..., Swapper], installation: Installation
) -> None:
    swapper = make()
    before = installation.pool.in_use_bytes()
    handles = [saved(swapper, MIB, seed) for seed in range(2)]
    swapper.rescue(MIB)
    del handles
    swapper._engine.poll()
    assert installation.pool.in_use_bytes() == before
    assert swapper._engine.host_in_use_bytes == 0
    assert not swapper._resident
    assert not swapper._index


def test_rescue_when_a_dropped_graph_was_still_being_copied_then_its_memory_is_freed(
    make: Callable[..., Swapper], installation: Installation
) -> None:
    swapper = make()
    before = installation.pool.in_use_bytes()
    handle = saved(swapper, 4 * MIB)
    assert handle.group is not None
    assert swapper._copy_out(handle.group)
    transfer = handle.group.transfer
    assert transfer is not None
    del handle
    transfer._event.synchronize()
    del transfer
    swapper.rescue(1)
    assert installation.pool.in_use_bytes() == before


# ---- write-behind ------------------------------------------------------------------------------


def test_write_behind_when_memory_is_free_then_it_rests(make: Callable[..., Swapper]) -> None:
    swapper = make()
    handles = [saved(swapper, MIB, seed) for seed in range(3)]
    assert swapper._engine.copied_out_bytes == 0
    assert {state_of(handle) for handle in handles} == {State.RESIDENT}


def test_write_behind_when_memory_fills_then_the_oldest_are_copied_and_stay(
    make: Callable[..., Swapper],
) -> None:
    swapper = make(budget_bytes=1)
    handles = []
    for seed in range(4):
        handles.append(saved(swapper, MIB, seed))
        assert swapper._engine.in_flight <= COPIES_IN_FLIGHT
    assert swapper._engine.copied_out_bytes > 0
    settle(swapper, handles[0])
    assert state_of(handles[0]) is State.CLEAN
    assert swapper._engine.copied_in_bytes == 0
    assert torch.equal(swapper.unpack(handles[0]), numbers(MIB))


def test_write_behind_when_the_forward_still_holds_a_storage_then_it_waits(
    make: Callable[..., Swapper],
) -> None:
    swapper = make(budget_bytes=1)
    tensor = numbers(4096)
    handle = swapper.pack(tensor)
    assert state_of(handle) is State.RESIDENT
    del tensor
    kept = numbers(4096, 1)
    swapper.pack(kept)
    assert state_of(handle) is State.COPYING_OUT


def test_write_behind_when_the_last_step_evicted_nothing_then_the_next_copies_nothing(
    make: Callable[..., Swapper],
) -> None:
    swapper = make(budget_bytes=1)
    swapper.end_step()
    handles = [saved(swapper, MIB, seed) for seed in range(3)]
    assert swapper._engine.copied_out_bytes == 0
    assert swapper.rescue(MIB) == MIB
    del handles
    swapper.end_step()
    handles = [saved(swapper, MIB, seed) for seed in range(5)]
    for handle in handles:
        settle(swapper, handle)
    assert MIB < swapper._engine.copied_out_bytes <= 3 * MIB  # 1.25 MiB ahead, in whole storages
