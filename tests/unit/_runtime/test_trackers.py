"""What stands for a tensor that is not kept: its version, and the address of its storage."""

from __future__ import annotations

import gc
import weakref

import torch

import swapkit
from swapkit._runtime.recompute.layouts import layout_of
from swapkit._runtime.recompute.leaves import claim, flatten, tensor_of, unflatten
from swapkit._runtime.recompute.settings import Settings
from swapkit._runtime.runtime import get_runtime
from tests.support import MIB

aten = torch.ops.aten


def test_version_when_a_tensor_or_a_view_of_it_changes_then_it_counts_without_keeping_it(
    installation: object,  # noqa: ARG001 - whose memory is counted
) -> None:
    tensor = torch.ones(MIB)
    tensor.add_(1)
    version = get_runtime().shim.version(tensor)
    assert version.then == version.now == 1
    tensor[:2].add_(1)
    assert (version.then, version.now) == (1, 2)
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    del tensor
    assert swapkit.memory_stats()["allocated_bytes.all.current"] == before - 4 * MIB
    assert version.now == 2


def test_version_when_the_tensor_gets_other_data_then_it_is_still_the_tensors() -> None:
    tensor = torch.ones(2)
    version = get_runtime().shim.version(tensor)
    tensor.data = torch.zeros(3)
    tensor.add_(1)
    assert version.now == tensor._version


def test_claim_when_the_tensors_go_then_their_addresses_are_kept_but_not_their_memory(
    installation: object,  # noqa: ARG001 - whose memory is counted
) -> None:
    tensors = [torch.ones(MIB) for _ in range(4)]
    addresses = {get_runtime().shim.storage_of(each) for each in tensors}
    kept = claim(tensors)
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    tensors.clear()
    assert swapkit.memory_stats()["allocated_bytes.all.current"] == before - 16 * MIB
    others = [torch.ones(MIB) for _ in range(64)]
    assert addresses.isdisjoint(get_runtime().shim.storage_of(each) for each in others)
    del kept


def test_trackers_when_made_then_the_collector_has_nothing_to_look_at() -> None:
    tensor = torch.ones(2)
    shim = get_runtime().shim
    for each in (shim.version(tensor), shim.claim([tensor]), shim.saved_tensor(tensor)):
        assert not gc.is_tracked(each)
    assert layout_of(tensor) is layout_of(torch.zeros(2))
    assert Settings.note() is Settings.note()


def test_arguments_when_there_are_lists_and_names_then_built_again_from_their_leaves() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    for args, kwargs in (
        ((one, 2), {}),
        (([one, other], 0), {}),
        ((one, [2, 1], None), {"dtype": torch.float64, "of": [other]}),
        ((), {"tensors": [], "dim": 1}),
        ((one, [[1, 2], (3, other)]), {}),
        (((one, other),), {"sizes": (2, 3)}),
    ):
        leaves, form = flatten(args, kwargs)
        assert any(each is one for each in leaves) == (bool(args) and "tensors" not in kwargs)
        again_args, again_kwargs = unflatten(leaves, form)
        assert str(again_args) == str(args)
        assert str(again_kwargs) == str(kwargs)
        assert [type(each) for each in again_args] == [type(each) for each in args]


def test_reference_when_the_tensor_lives_on_in_a_graph_then_it_is_the_same_one() -> None:
    tensor = torch.ones(2)
    reference = weakref.ref(tensor)
    holder = [tensor]
    del tensor
    assert tensor_of(reference) is holder[0]
    holder.clear()
    assert tensor_of(reference) is None
