"""Groups go only where they may, and a handle rebuilds its tensor bit for bit."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._runtime.groups import SavedTensor, State, StorageGroup
from swapkit.errors import CorruptState, SavedTensorModified

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOWED = {
    (State.RESIDENT, State.COPYING_OUT),
    (State.COPYING_OUT, State.CLEAN),
    (State.COPYING_OUT, State.RESIDENT),
    (State.CLEAN, State.OUT),
    (State.OUT, State.COPYING_IN),
    (State.COPYING_IN, State.CLEAN),
    (State.COPYING_IN, State.OUT),
}


def make_group(tensor: torch.Tensor) -> StorageGroup:
    return StorageGroup(tensor.untyped_storage(), tensor._version, tag=0)


def away_and_back(handle: SavedTensor, group: StorageGroup) -> None:
    """Move the bytes to a new storage, as a swap does."""
    assert group.storage is not None
    copy = group.storage.clone()
    group.strip()
    group.restore(copy)
    handle.fill(copy)


@pytest.mark.parametrize(("source", "target"), list(product(State, State)))
def test_move_when_asked_then_only_the_allowed_ones_happen(source: State, target: State) -> None:
    group = make_group(torch.ones(1))
    group.state = source
    if (source, target) in ALLOWED:
        group.move(target)
        assert group.state is target
    else:
        with pytest.raises(CorruptState, match=f"from {source.value} to {target.value}"):
            group.move(target)
        assert group.state is source


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


def test_strip_when_the_handles_are_the_only_holders_then_the_bytes_are_let_go() -> None:
    tensor = torch.ones(16)
    group = make_group(tensor)
    handles = [SavedTensor(tensor, group), SavedTensor(tensor[4:], group)]
    storage = tensor.untyped_storage()
    del tensor
    group.strip()
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert all(handle.is_stripped for handle in handles)
    assert all(handle.alias.untyped_storage().nbytes() == 0 for handle in handles)
    assert group.storage is None


def test_strip_when_done_twice_then_the_view_is_not_lost() -> None:
    tensor = torch.arange(6.0)[2:]
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    handle.strip()
    handle.strip()
    assert group.storage is not None
    handle.fill(group.storage)
    handle.fill(group.storage)
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
    handle = SavedTensor(tensor, group)
    del tensor
    assert group.is_exclusive()
    handle.alias.untyped_storage().resize_(0)
    assert not group.is_exclusive()


def test_exclusive_when_the_storage_is_gone_then_not() -> None:
    group = make_group(torch.ones(1))
    group.strip()
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


def test_restore_when_done_then_the_key_is_that_of_the_new_storage() -> None:
    tensor = torch.ones(4)
    group = make_group(tensor)
    version = group.key[1]
    copy = tensor.untyped_storage().clone()
    group.strip()
    group.restore(copy)
    assert group.key == (copy._cdata, version)
    assert group.storage is copy


@pytest.mark.parametrize("stripped", [False, True])
def test_version_when_changed_in_place_then_the_error_is_autograds(stripped: bool) -> None:
    tensor = torch.ones(3, 4)
    group = make_group(tensor)
    handle = SavedTensor(tensor, group)
    if stripped:
        group.strip()
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
