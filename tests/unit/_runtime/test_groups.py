"""A group knows who holds its storage, and a handle rebuilds its tensor bit for bit."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.sched import Scheduler, State, Tier
from swapkit._runtime.groups import PART_ALIGNMENT, SavedTensor, StorageGroup
from swapkit._runtime.runtime import get_runtime
from swapkit.errors import SavedTensorModified
from tests.unit._runtime.rig import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable

SHIM = get_runtime().shim


def make_group(tensor: torch.Tensor) -> StorageGroup:
    storage = tensor.untyped_storage()
    return StorageGroup(storage, (storage._cdata, tensor._version), AUTO)


def away_and_back(handle: SavedTensor, group: StorageGroup) -> None:
    """Move the bytes to a new storage, as a swap does."""
    assert group.storage is not None
    copy = group.storage.clone()
    group.strip(SHIM)
    group.restore(copy)
    handle.fill(SHIM)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "slice with offset": lambda x: x[1:, 2:5],
    "every other": lambda x: x[:, ::2],
    "expanded": lambda x: x[0, 0].expand(3, 4),
    "scalar": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
    "other type": lambda x: x.view(torch.int16),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_fill_when_the_storage_is_another_then_the_view_is_the_same(
    name: str, dtype: torch.dtype
) -> None:
    base = torch.arange(48).reshape(6, 8).to(dtype)
    tensor = VIEWS[name](base)
    expected = tensor.clone()
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    away_and_back(handle, group)
    alias = handle.alias
    assert torch.equal(alias, expected)
    assert alias.dtype == tensor.dtype
    assert alias.stride() == tensor.stride()
    assert alias.storage_offset() == tensor.storage_offset()
    assert alias.data_ptr() != tensor.data_ptr() or alias.numel() == 0


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view, lambda x: torch.conj(x).imag])
def test_fill_when_the_tensor_is_lazily_turned_then_the_bit_stays(
    turn: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = turn(torch.tensor([1 + 2j, -3 - 4j]))
    assert tensor.is_conj() or tensor.is_neg()
    expected = tensor.resolve_conj().resolve_neg().clone()
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    away_and_back(handle, group)
    assert torch.equal(handle.alias, expected)
    assert handle.alias.is_conj() == tensor.is_conj()
    assert handle.alias.is_neg() == tensor.is_neg()


def test_fill_when_the_group_is_not_there_then_nothing_happens() -> None:
    group = make_group(tensor := torch.ones(4))
    handle = SavedTensor(tensor, group)
    group.strip(SHIM)
    handle.fill(SHIM)
    assert handle.is_stripped
    SavedTensor(tensor).fill(SHIM)
    assert tensor.tolist() == [1.0] * 4


def test_strip_when_the_handles_are_the_only_holders_then_the_bytes_are_let_go() -> None:
    tensor = torch.ones(16)
    group = make_group(tensor)
    handles = [SavedTensor(tensor, group), SavedTensor(tensor[4:], group)]
    storage = tensor.untyped_storage()
    del tensor
    group.strip(SHIM)
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert all(handle.is_stripped for handle in handles)
    assert all(handle.alias.untyped_storage().nbytes() == 0 for handle in handles)
    assert group.storage is None


def test_strip_when_done_twice_then_the_view_is_not_lost() -> None:
    tensor = torch.arange(6.0)[2:]
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    handle.strip(SHIM)
    handle.strip(SHIM)
    assert group.storage is not None
    handle.fill(SHIM)
    handle.fill(SHIM)
    assert handle.alias.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_exclusive_when_a_tensor_outside_holds_the_storage_then_not() -> None:
    tensor = torch.ones(16)
    group = make_group(tensor)
    handles = [SavedTensor(tensor, group), SavedTensor(tensor[1:], group)]
    view = tensor[8:]
    del tensor
    assert not group.is_exclusive()
    del view
    assert group.is_exclusive()
    assert len(handles) == 2


def test_exclusive_when_a_view_handed_out_is_in_use_then_not() -> None:
    tensor = torch.ones(16)
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    del tensor
    unpacked = handle.alias.detach()
    assert not group.is_exclusive()
    del unpacked
    assert group.is_exclusive()


def test_exclusive_when_the_storage_was_resized_then_not() -> None:
    tensor = torch.ones(16)
    group = make_group(tensor)
    group.cover((0, 64))
    handle = SavedTensor(tensor, group)
    del tensor
    assert group.is_exclusive()
    handle.alias.untyped_storage().resize_(0)
    assert not group.is_exclusive()


def test_exclusive_when_the_storage_is_gone_then_not() -> None:
    group = make_group(torch.ones(1))
    group.strip(SHIM)
    assert not group.is_exclusive()


def test_handles_when_some_died_then_only_the_living_count() -> None:
    tensor = torch.ones(4)
    group = make_group(tensor)
    first, second = SavedTensor(tensor, group), SavedTensor(tensor, group)
    del first
    assert group.handles() == [second]
    del tensor
    assert group.is_exclusive()


def test_group_when_its_last_handle_goes_then_it_goes_without_the_collector() -> None:
    tensor = torch.ones(4)
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    reference = weakref.ref(group)
    gc.disable()
    try:
        del group, handle
        assert reference() is None
    finally:
        gc.enable()


# ---- given up, and taken back -------------------------------------------------------------------


def leave(
    make: Callable[[], torch.Tensor], scheduler: Scheduler
) -> tuple[StorageGroup, SavedTensor]:
    """Return a group whose storage was given up, whoever else still holds it."""
    tensor = make()
    group = make_group(tensor)
    group.cover((0, group.nbytes))
    handle = SavedTensor(tensor, group)
    del tensor
    native, device = group.begin(scheduler, Tier.HOST)
    native.copy_out(device, owner=0, next_use=0)
    native.finish_out()
    native.evict()
    group.strip(SHIM)
    return group, handle


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(Backend.cpu(), drop_owner=SHIM.drop_address)


def test_revive_when_somebody_else_keeps_the_storage_then_it_is_taken_back(
    scheduler: Scheduler,
) -> None:
    tensor = torch.arange(4.0)
    group, handle = leave(lambda: tensor, scheduler)
    assert group.state == State.OUT
    assert group.revive()
    assert group.state == State.CLEAN
    handle.fill(SHIM)
    assert handle.alias.data_ptr() == tensor.data_ptr()


def test_revive_when_nobody_kept_the_storage_then_it_is_gone_with_its_memory(
    scheduler: Scheduler,
) -> None:
    tensors = [torch.arange(4.0)]
    address = tensors[0].untyped_storage()._cdata
    group, _handle = leave(lambda: tensors[0], scheduler)
    assert group.weak
    tensors.clear()
    assert not group.revive()
    assert group.state == State.OUT
    others = [torch.ones(4).untyped_storage() for _ in range(100)]
    assert all(other._cdata != address for other in others)  # a weak reference keeps it


def test_revive_when_nobody_else_held_the_storage_then_not(scheduler: Scheduler) -> None:
    group, _handle = leave(lambda: torch.arange(4.0), scheduler)
    assert not group.weak
    assert not group.revive()


def test_restore_when_done_then_the_storage_given_up_is_forgotten(scheduler: Scheduler) -> None:
    tensor = torch.arange(4.0)
    group, handle = leave(lambda: tensor, scheduler)
    copy = torch.arange(4.0).untyped_storage()
    group.restore(copy)
    assert not group.weak
    assert group.is_of(copy._cdata)
    assert not group.is_of(tensor.untyped_storage()._cdata)
    handle.fill(SHIM)
    assert handle.alias.data_ptr() == copy.data_ptr()


# ---- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "part", "nbytes"),
    [(0, 1024, 0, 4096), (0, 512, 0, 4096), (0, 511, 0, 2044), (513, 700, 2048, 752)],
    ids=["whole", "half", "less than half", "not aligned"],
)
def test_begin_when_views_cover_less_than_half_then_only_they_move(
    scheduler: Scheduler, first: int, last: int, part: int, nbytes: int
) -> None:
    tensor = torch.arange(1024.0)
    group = make_group(tensor)
    group.cover((4 * first, 4 * last))
    assert group.is_partial == (nbytes < 4096)
    native, device = group.begin(scheduler, Tier.HOST)
    assert device == tensor.data_ptr() + part
    assert part % PART_ALIGNMENT == 0
    assert native.nbytes == group.nbytes == nbytes


def test_fill_when_a_part_is_back_then_offsets_are_those_of_the_part(
    scheduler: Scheduler,
) -> None:
    tensor = torch.arange(1024.0)
    view = tensor[520:600:3]
    expected = view.clone()
    group = make_group(tensor)
    group.cover((4 * 520, 4 * 600))
    handle = SavedTensor(view, group)
    group.begin(scheduler, Tier.HOST)
    part = tensor[group.part_bytes // 4 :][: group.nbytes // 4].clone().untyped_storage()
    group.strip(SHIM)
    group.restore(part)
    handle.fill(SHIM)
    assert torch.equal(handle.alias, expected)
    assert handle.alias.storage_offset() == 520 - group.part_bytes // 4


def test_cover_when_a_part_is_back_then_spans_are_those_of_the_first_storage(
    scheduler: Scheduler,
) -> None:
    group = make_group(tensor := torch.arange(1024.0))
    group.cover((2048, 2448))
    assert group.can_cover((0, 4096))  # there is no copy yet
    group.begin(scheduler, Tier.HOST)
    assert group.can_cover((2048, 2448))
    assert not group.can_cover((2047, 2448))
    assert not group.can_cover((2048, 2449))
    group.strip(SHIM)
    group.restore(torch.ones(100).untyped_storage())
    assert group.can_cover((0, 400))
    assert not group.can_cover((0, 401))
    group.cover((4, 8))
    assert (group.begin_bytes, group.end_bytes) == (2048, 2448)
    assert tensor.numel() == 1024


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stripped", [False, True])
def test_version_when_changed_in_place_then_the_error_is_autograds(stripped: bool) -> None:
    tensor = torch.ones(3, 4)
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    if stripped:
        group.strip(SHIM)
    handle.check_version("layers.0")
    tensor[0].add_(1)  # through a view
    with pytest.raises(SavedTensorModified) as caught:
        handle.check_version("layers.0")
    text = str(caught.value)
    assert "modified by an inplace operation: torch.float32 [3, 4], saved in layers.0," in text
    assert "is at version 1; expected version 0 instead" in text


def test_version_when_the_module_is_unknown_then_the_text_has_none() -> None:
    tensor = torch.ones(2)
    handle = SavedTensor(tensor)
    tensor.zero_()
    with pytest.raises(SavedTensorModified, match=r"torch\.float32 \[2\] is at version 1"):
        handle.check_version("")


def test_version_when_the_bytes_are_back_then_changes_still_count() -> None:
    tensor = torch.ones(4)
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    away_and_back(handle, group)
    handle.check_version("")
    tensor.mul_(2)
    with pytest.raises(SavedTensorModified):
        handle.check_version("")


def test_version_when_an_inference_tensor_is_saved_then_nothing_is_checked() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
    SavedTensor(tensor).check_version("")


def test_handle_when_a_leaf_gathers_gradients_then_it_is_kept_itself() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert SavedTensor(leaf).alias is leaf
    result = leaf * 2
    assert SavedTensor(result).alias is not result  # which would tie the graph into a cycle
    assert SavedTensor(result).alias.data_ptr() == result.data_ptr()
