"""Storages of graphs that went while they were copied wait for a thread with the interpreter."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._runtime.process.runtime import get_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("installation")


@pytest.fixture
def switch() -> Iterator[Callable[[bool], None]]:
    """Turn the rescue of torch's own allocator on and off, without a torch for CUDA.

    Turning it off lets go of the storages that wait. What `native_rescue` does besides, registering
    with torch's allocator, needs torch's CUDA library.
    """
    library: Any = get_runtime().shim._library
    function = ctypes.PYFUNCTYPE(None, ctypes.c_int8, ctypes.c_bool)(
        ("_ZN7swapkit13rescue_switchEab", ctypes.PyDLL(library._name))
    )
    yield lambda on: function(0, on)
    function(0, False)


def drop_copied(memory: torch.Tensor) -> None:
    """Let the thread of the copies be the last to hold a storage of a GPU."""
    shim = get_runtime().shim
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("cuda:0"), memory.nbytes
    )
    owner = shim.new_owner(storage._cdata)  # the copy's
    ctypes.CFUNCTYPE(None, ctypes.c_size_t)(shim.drop_address)(owner)


def test_garbage_when_it_was_let_go_of_then_none_waits_any_more(
    switch: Callable[[bool], None],
) -> None:
    shim = get_runtime().shim
    memory = torch.zeros(64)
    assert shim.native_garbage() == 0
    for _ in range(2):  # the second time, too
        switch(True)
        drop_copied(memory)
        drop_copied(memory)
        assert shim.native_garbage() == 2
        switch(False)
        assert shim.native_garbage() == 0


def test_garbage_when_the_rescue_is_off_then_storages_go_at_once(
    switch: Callable[[bool], None],
) -> None:
    switch(False)
    drop_copied(torch.zeros(64))
    assert get_runtime().shim.native_garbage() == 0
