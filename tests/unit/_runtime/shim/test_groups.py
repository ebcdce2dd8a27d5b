"""A group knows who holds its storage, and a handle rebuilds its tensor bit for bit."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._native.sched import State
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.shim.types import Placement
from swapkit.errors import SavedTensorModified
from swapkit.ir.plans import Action
from tests.unit._runtime.rig import evict, group_of, make_swapper, save, state_of, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import SavedTensor

pytestmark = pytest.mark.usefixtures("installation")

ANY = Placement(Action.AUTO, min_bytes=1)
PART_ALIGNMENT = 64


@pytest.fixture
def swapper() -> Swapper:
    return make_swapper()


def keep(tensor: torch.Tensor) -> SavedTensor:
    """Return a handle without a group."""
    return get_runtime().shim.saved_tensor(tensor)


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
def test_unpack_when_the_storage_is_another_then_the_view_is_the_same(
    swapper: Swapper, name: str, dtype: torch.dtype
) -> None:
    base = torch.arange(48).reshape(6, 8).to(dtype)
    tensor = VIEWS[name](base)
    expected, stride, offset = tensor.clone(), tensor.stride(), tensor.storage_offset()
    whole, handle = save(swapper, base, ANY), save(swapper, tensor, ANY)
    address = base.data_ptr()
    evict(swapper, whole)
    kept = torch.empty_like(base)  # nothing comes back to where it was
    del tensor
    again = unpack(swapper, handle)
    assert torch.equal(again, expected)
    assert again.dtype == expected.dtype
    assert again.stride() == stride
    assert again.storage_offset() == offset
    assert kept.data_ptr() != address
    if again.numel() > 0:
        assert handle.group is whole.group


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view, lambda x: torch.conj(x).imag])
def test_unpack_when_the_tensor_is_lazily_turned_then_the_bit_stays(
    swapper: Swapper, turn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = turn(torch.tensor([1 + 2j, -3 - 4j]))
    bits = tensor.is_conj(), tensor.is_neg()
    assert any(bits)
    expected = tensor.resolve_conj().resolve_neg().clone()
    handle = save(swapper, tensor, ANY)
    del tensor
    evict(swapper, handle)
    again = unpack(swapper, handle)
    assert torch.equal(again, expected)
    assert (again.is_conj(), again.is_neg()) == bits


# ---- who holds a storage ------------------------------------------------------------------------


def test_group_when_it_is_out_then_its_handles_hold_nothing(swapper: Swapper) -> None:
    tensor = torch.ones(16)
    handles = [save(swapper, tensor, ANY), save(swapper, tensor[4:], ANY)]
    storage = tensor.untyped_storage()
    del tensor
    evict(swapper, handles[0])
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert all(handle.is_stripped for handle in handles)
    assert all(handle.alias.untyped_storage().nbytes() == 0 for handle in handles)
    assert group_of(handles[0]).storage is None
    assert not group_of(handles[0]).is_on_device


def test_exclusive_when_a_tensor_outside_holds_the_storage_then_not(swapper: Swapper) -> None:
    tensor = torch.ones(16)
    handles = [save(swapper, tensor, ANY), save(swapper, tensor[1:], ANY)]
    group = group_of(handles[0])
    view = tensor[8:]
    del tensor
    assert not group.is_exclusive
    del view
    assert group.is_exclusive


def test_exclusive_when_a_view_handed_out_is_in_use_then_not(swapper: Swapper) -> None:
    handle = save(swapper, torch.ones(16), ANY)
    unpacked = unpack(swapper, handle)
    assert not group_of(handle).is_exclusive
    del unpacked
    assert group_of(handle).is_exclusive


def test_exclusive_when_the_storage_was_resized_then_not(swapper: Swapper) -> None:
    handle = save(swapper, torch.ones(16), ANY)
    assert group_of(handle).is_exclusive
    handle.alias.untyped_storage().resize_(0)
    assert not group_of(handle).is_exclusive


def test_exclusive_when_the_storage_is_gone_then_not(swapper: Swapper) -> None:
    handle = save(swapper, torch.ones(1), ANY)
    evict(swapper, handle)
    assert not group_of(handle).is_exclusive


def test_handles_when_some_died_then_only_the_living_count(swapper: Swapper) -> None:
    tensor = torch.ones(4)
    handles = [save(swapper, tensor, ANY) for _ in range(3)]
    group = group_of(handles[0])
    del handles[1]
    assert set(group.handles) == set(handles)
    del tensor
    assert group.is_exclusive
    del handles[0]
    assert group.handles == handles
    assert group.is_exclusive


def test_group_when_its_last_handle_goes_then_it_goes_without_the_collector(
    swapper: Swapper,
) -> None:
    handle = save(swapper, torch.ones(4), ANY)
    reference, saved = weakref.ref(group_of(handle)), weakref.ref(handle)
    gc.disable()
    try:
        del handle
        assert reference() is None
        assert saved() is None
    finally:
        gc.enable()
    assert swapper.mover.resident == []


# ---- given up, and taken back -------------------------------------------------------------------


def test_storage_when_somebody_else_keeps_it_then_it_is_taken_back(swapper: Swapper) -> None:
    tensor = torch.arange(4.0)
    handle = save(swapper, tensor.detach(), ANY)
    evict(swapper, handle)
    group = group_of(handle)
    assert group.is_kept_by_others
    assert state_of(handle) == State.OUT
    assert unpack(swapper, handle).data_ptr() == tensor.data_ptr()
    assert state_of(handle) == State.CLEAN
    assert group in swapper.mover.resident


def test_storage_when_nobody_keeps_it_then_it_is_gone_with_its_memory(swapper: Swapper) -> None:
    tensors = [torch.arange(4.0)]
    address = tensors[0].untyped_storage()._cdata
    handle = save(swapper, tensors[0], ANY)
    evict(swapper, handle)
    tensors.clear()
    others = [torch.ones(4).untyped_storage() for _ in range(100)]
    assert all(other._cdata != address for other in others)  # a weak reference keeps it
    assert unpack(swapper, handle).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not group_of(handle).is_kept_by_others
    assert swapper.scheduler.stats().copied_in_bytes == 16


def test_storage_when_nobody_else_held_it_then_there_is_nothing_to_take_back(
    swapper: Swapper,
) -> None:
    handle = save(swapper, torch.arange(4.0), ANY)
    evict(swapper, handle)
    assert not group_of(handle).is_kept_by_others


# ---- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "part", "nbytes"),
    [(0, 1024, 0, 4096), (0, 512, 0, 4096), (0, 511, 0, 2044), (513, 700, 2048, 752)],
    ids=["whole", "half", "less than half", "not aligned"],
)
def test_copy_when_views_cover_less_than_half_then_only_they_move(
    swapper: Swapper, first: int, last: int, part: int, nbytes: int
) -> None:
    tensor = torch.arange(1024.0)
    view = tensor[first:last]
    expected = view.clone()
    handle = save(swapper, view, ANY)
    group = group_of(handle)
    assert group.is_partial == (nbytes < 4096)
    del tensor, view
    evict(swapper, handle)
    assert group.part_bytes == part
    assert part % PART_ALIGNMENT == 0
    assert group.nbytes == swapper.scheduler.stats().copied_out_bytes == nbytes
    again = unpack(swapper, handle)
    assert torch.equal(again, expected)
    assert again.storage_offset() == first - part // 4
    assert again.untyped_storage().nbytes() == nbytes


def test_part_when_it_is_back_then_views_of_it_join_and_others_do_not(swapper: Swapper) -> None:
    tensor = torch.arange(1024.0)
    handle = save(swapper, tensor[512:612], ANY)
    del tensor
    evict(swapper, handle)
    part = unpack(swapper, handle)
    assert save(swapper, part[10:20:3], ANY).group is handle.group
    wider = part.as_strided((100,), (1,), 0)
    assert save(swapper, wider, ANY).group is handle.group
    evict(swapper, handle)
    del part, wider
    assert torch.equal(unpack(swapper, handle), torch.arange(512.0, 612.0))


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_out", [False, True])
def test_version_when_changed_in_place_then_the_error_is_autograds(
    swapper: Swapper, is_out: bool
) -> None:
    tensor = torch.ones(3, 4)
    model = torch.nn.Sequential(torch.nn.Identity())
    runtime = get_runtime()
    runtime.tracker.add_model(model)
    runtime.tracker.start("test")
    handles: list[SavedTensor] = []
    hook = model[0].register_forward_pre_hook(
        lambda _module, inputs: handles.append(save(swapper, inputs[0], ANY))
    )
    try:
        model(tensor)
    finally:
        hook.remove()
        runtime.tracker.stop("test")
    (handle,) = handles
    if is_out:
        evict(swapper, handle)
    assert torch.equal(unpack(swapper, handle), torch.ones(3, 4))
    if is_out:
        evict(swapper, handle)
    tensor[0].add_(1)  # through a view
    with pytest.raises(SavedTensorModified) as caught:
        unpack(swapper, handle)
    text = str(caught.value)
    assert "modified by an inplace operation: torch.float32 [3, 4], saved in 0," in text
    assert "is at version 1; expected version 0 instead" in text


def test_version_when_it_is_of_no_module_then_the_text_names_none(swapper: Swapper) -> None:
    tensor = torch.ones(2)
    handles = [save(swapper, tensor, ANY), keep(tensor)]
    tensor.zero_()
    for handle in handles:
        with pytest.raises(SavedTensorModified, match=r"torch\.float32 \[2\] is at version 1"):
            unpack(swapper, handle)


def test_version_when_the_bytes_are_back_then_changes_still_count(swapper: Swapper) -> None:
    tensor = torch.ones(4)
    handle = save(swapper, tensor, ANY)
    evict(swapper, handle)
    unpack(swapper, handle)
    tensor.mul_(2)
    with pytest.raises(SavedTensorModified):
        unpack(swapper, handle)


def test_version_when_an_inference_tensor_is_saved_then_nothing_is_checked(
    swapper: Swapper,
) -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
        handle = keep(tensor)
        tensor.add_(1)
    assert unpack(swapper, handle).tolist() == [2.0] * 4


def test_handle_when_a_leaf_gathers_gradients_then_it_is_kept_itself() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert keep(leaf).alias is leaf
    result = leaf * 2
    assert keep(result).alias is not result  # which would tie the graph into a cycle
    assert keep(result).alias.data_ptr() == result.data_ptr()
    assert get_runtime().shim.saved_tensor(result, itself=True).alias is result
