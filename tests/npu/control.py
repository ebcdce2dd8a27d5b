"""What tests do to the simulated device behind torch_npu's back, and to its queue of the host."""

from __future__ import annotations

import ctypes
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch_npu
from torch_npu import npu

from tests.npu.operators import folder
from tests.npu.simulated import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

DEVICE_TO_HOST = 2
SEMAPHORE_BYTES = 64  # at least sizeof(sem_t)


@functools.cache
def runtime() -> ctypes.CDLL:
    """Return the simulated libascendcl.so."""
    return ctypes.CDLL(str(RUNTIME / "libascendcl.so"))


def handle_without_draining() -> int:
    """Return the current stream's handle. What is queued may not be in the stream yet."""
    return int(torch_npu._C._npu_getCurrentRawStreamNoWait(npu.current_device()))


def handle_of(stream: npu.Stream) -> int:
    """Return a stream's handle, when all that torch_npu has queued is in the stream."""
    return int(stream.npu_stream)


def copy_raw(to: torch.Tensor, source: torch.Tensor, handle: int) -> None:
    """Copy from the device to pinned memory by a call of the runtime, and wait for it."""
    assert to.is_pinned()
    stream = ctypes.c_void_p(handle)
    size = ctypes.c_size_t(source.untyped_storage().nbytes())
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (to, source)]
    answer = runtime().aclrtMemcpyAsync(
        addresses[0], size, addresses[1], size, DEVICE_TO_HOST, stream
    )
    assert answer == 0
    assert runtime().aclrtSynchronizeStream(stream) == 0


@contextmanager
def _semaphore() -> Iterator[tuple[ctypes.CDLL, ctypes.Array[ctypes.c_char]]]:
    """Yield the C library and a semaphore, which is posted in the end."""
    library = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
    assert library.sem_init(semaphore, 0, 0) == 0
    try:
        yield library, semaphore
    finally:
        library.sem_post(semaphore)


@contextmanager
def busy(stream: npu.Stream) -> Iterator[None]:
    """Let a stream do nothing meanwhile: it waits for a semaphore, in a function of the host."""
    with _semaphore() as (library, semaphore):
        handle = ctypes.c_void_p(handle_of(stream))
        assert runtime().aclrtLaunchHostFunc(handle, library.sem_wait, semaphore) == 0
        yield
    stream.synchronize()


@contextmanager
def held_queue() -> Iterator[None]:
    """Let torch_npu's queue stand still meanwhile: nothing that is queued comes into a stream."""
    with _semaphore() as (_, semaphore):
        ctypes.PyDLL(str(folder() / "operators.so")).operators_hold_queue(semaphore)
        yield
    npu.synchronize()
