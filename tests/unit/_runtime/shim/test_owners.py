"""Owners of copies: what a copy uses stays, whatever becomes of the storage meanwhile."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._runtime.process.runtime import get_runtime
from tests.support import MIB
from tests.support.instruments import Instrument
from tests.unit._runtime.rig import (
    SWAP,
    group_of,
    in_use,
    make_swapper,
    numbers,
    save,
    settle,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation

pytestmark = pytest.mark.usefixtures("installation")


def give_up(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


@pytest.mark.parametrize("exchange", [give_up, share])
def test_memory_when_exchanged_while_a_copy_reads_it_then_the_pool_gets_it_behind_the_copy(
    exchange: Callable[[torch.Tensor], None], installation: Installation
) -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    before = in_use(installation)
    tensor = numbers(4 * MIB)
    handle = save(swapper, tensor)
    assert swapper.mover.copy_out(group_of(handle))
    exchange(tensor)
    assert in_use(installation) == before + 4 * MIB
    slow.release_copies()
    settle(swapper)
    assert in_use(installation) == before
    del handle
    settle(swapper)


def test_memory_when_given_up_for_other_memory_at_its_address_then_the_copy_is_not_used() -> None:
    swapper = make_swapper()
    tensor = numbers(4 * MIB)
    handle = save(swapper, tensor)
    group = group_of(handle)
    assert swapper.mover.copy_out(group)
    settle(swapper)
    address, storage = tensor.data_ptr(), tensor.untyped_storage()
    storage.resize_(0)
    storage.resize_(4 * MIB)
    assert tensor.data_ptr() == address
    others = torch.empty(0).set_(storage, 0, tensor.shape, tensor.stride())  # unknown to autograd
    others.copy_(numbers(4 * MIB, seed=1))
    swapper.mover.release(group)
    del tensor, storage, others
    assert torch.equal(unpack(swapper, handle), numbers(4 * MIB, seed=1))


def test_array_when_the_storage_lets_go_of_it_then_it_lives_until_the_copy_is_done() -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    array = np.arange(MIB, dtype=np.float32)
    alive = weakref.ref(array)
    tensor = torch.from_numpy(array)
    del array
    handle = save(swapper, tensor, SWAP)
    assert swapper.mover.copy_out(group_of(handle))
    tensor.share_memory_()
    gc.collect()
    assert alive() is not None
    slow.release_copies()
    settle(swapper)
    gc.collect()
    assert alive() is None
    assert torch.equal(unpack(swapper, handle), torch.arange(MIB, dtype=torch.float32))


def test_storage_when_it_is_shared_by_processes_then_torch_still_knows_that() -> None:
    shim = get_runtime().shim
    for tensor in (torch.ones(64).share_memory_(), torch.ones(64), torch.from_numpy(np.ones(64))):
        storage = tensor.untyped_storage()
        is_shared, address = storage.is_shared(), storage.data_ptr()
        owner = shim.new_owner(storage._cdata)
        assert (storage.is_shared(), storage.data_ptr()) == (is_shared, address)
        shim.drop_owner(owner)
        assert (storage.is_shared(), storage.data_ptr()) == (is_shared, address)
