"""What every backend must do, through the Python handles; a new backend is one line in KINDS.

CUDA devices are those of the driver that SWAPKIT_CUDA_DRIVER names, else of the simulated one;
Ascend NPUs those of the runtime that SWAPKIT_ASCEND_RUNTIME names, else of the simulated one, which
has the simulated driver below it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import Backend, CopyKind, Pages
from swapkit._native.pool import Pool
from swapkit.errors import InvalidArgument, OutOfDeviceMemory
from tests.cuda.simulated import build_driver
from tests.npu.simulated import build_runtime
from tests.support.instruments import Instrument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
CAPACITY = 64 * MIB
NBYTES = 96 * KIB


def open_cpu() -> Backend:
    return Backend.cpu(capacity_bytes=CAPACITY)


def open_delay(inner: Backend) -> Backend:
    backend = Instrument.delay(inner)
    backend.release_copies()
    return backend


def decide(variable: str, build: Callable[[], Path], opened: Callable[[], Backend]) -> None:
    """Let the process's library be the simulated one, with little memory, unless one was named."""
    if variable in os.environ:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, str(build()))
        patch.setenv("CUSIM_CAPACITY", "128M")
        opened().close()  # which library it is was decided for good


@functools.cache
def find_driver() -> None:
    decide("SWAPKIT_CUDA_DRIVER", build_driver, Backend.cuda)


@functools.cache
def find_runtime() -> None:
    decide("SWAPKIT_ASCEND_RUNTIME", build_runtime, Backend.ascend)


def open_cuda(*, virtual_memory: bool = True) -> Backend:
    find_driver()
    return Backend.cuda(virtual_memory=virtual_memory)


def open_ascend(*, virtual_memory: bool = True, pages: Pages = Pages.HUGE_FIRST) -> Backend:
    find_runtime()
    return Backend.ascend(virtual_memory=virtual_memory, pages=pages)


KINDS: dict[str, Callable[[], Backend]] = {
    "cpu": open_cpu,
    "cpu with limits": lambda: Backend.cpu(
        capacity_bytes=CAPACITY, copy_bytes_per_s=4 << 30, copy_latency_ns=1000
    ),
    "fault": lambda: Instrument.fault(open_cpu()),
    "delay": lambda: open_delay(open_cpu()),
    "trace": lambda: Instrument.trace(open_cpu(), 100),
    "trace over fault over delay": lambda: Instrument.trace(
        Instrument.fault(open_delay(open_cpu())), 100
    ),
    "cuda": open_cuda,
    "cuda without virtual memory": lambda: open_cuda(virtual_memory=False),
    "trace over fault over delay over cuda": lambda: Instrument.trace(
        Instrument.fault(open_delay(open_cuda())), 100
    ),
    "ascend": open_ascend,
    "ascend without virtual memory": lambda: open_ascend(virtual_memory=False),
    "ascend in small pages": lambda: open_ascend(pages=Pages.NORMAL),
    "trace over fault over delay over ascend": lambda: Instrument.trace(
        Instrument.fault(open_delay(open_ascend())), 100
    ),
}


def is_real_driver() -> bool:
    """Whether the tests run on a GPU, so that its driver is in this process."""
    return os.environ.get("SWAPKIT_TEST_DEVICE") == "cuda"


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if "ascend" in request.param and is_real_driver():
        pytest.skip("the simulated CANN needs the simulated libcuda.so.1; the GPU's own is loaded")
    with KINDS[request.param]() as opened:
        yield opened


@pytest.fixture
def pool(backend: Backend) -> Iterator[Pool]:
    with Pool(backend) as opened:
        yield opened
        opened.trim()


def pattern(nbytes: int, seed: int) -> bytes:
    return bytes((seed + 31 * i) % 251 for i in range(256)) * (nbytes // 256)


def read(backend: Backend, address: int, nbytes: int) -> bytes:
    """Return what is in device memory, behind what the host's own order has been given."""
    target, event = ctypes.create_string_buffer(nbytes), backend.event()
    backend.copy(
        to=ctypes.addressof(target),
        source=address,
        nbytes=nbytes,
        kind=CopyKind.DEVICE_TO_HOST,
        stream=None,
    )
    event.record(None)
    event.synchronize()
    return target.raw


def test_memory_info_when_nothing_is_held_then_the_capacity_is_free(backend: Backend) -> None:
    info = backend.memory_info()
    assert CAPACITY <= info.free_bytes <= info.total_bytes


def test_memory_info_when_a_block_is_taken_then_less_is_free(backend: Backend, pool: Pool) -> None:
    before = backend.memory_info()
    address = pool.take(8 * MIB)
    assert backend.memory_info().free_bytes <= before.free_bytes - 8 * MIB
    pool.give(address)
    pool.trim()
    assert backend.memory_info() == before


def test_take_when_device_is_too_small_then_out_of_device_memory(
    backend: Backend, pool: Pool
) -> None:
    with pytest.raises(OutOfDeviceMemory):
        pool.take(backend.memory_info().total_bytes + 1)
    pool.check()


def test_copy_when_there_and_back_then_bytes_are_equal(backend: Backend, pool: Pool) -> None:
    stream = backend.stream()
    source = ctypes.create_string_buffer(pattern(NBYTES, 1), NBYTES)
    target = ctypes.create_string_buffer(NBYTES)
    first, second = pool.take(NBYTES, stream), pool.take(NBYTES, stream)
    for to, origin, kind in (
        (first, ctypes.addressof(source), CopyKind.HOST_TO_DEVICE),
        (second, first, CopyKind.DEVICE_TO_DEVICE),
        (ctypes.addressof(target), second, CopyKind.DEVICE_TO_HOST),
    ):
        backend.copy(to=to, source=origin, nbytes=NBYTES, kind=kind, stream=stream)
    stream.synchronize()
    assert target.raw == source.raw
    pool.give(first)
    pool.give(second)


def test_copy_when_no_stream_then_in_the_hosts_order(backend: Backend, pool: Pool) -> None:
    source = ctypes.create_string_buffer(pattern(NBYTES, 2), NBYTES)
    address = pool.take(NBYTES)
    backend.copy(
        to=address,
        source=ctypes.addressof(source),
        nbytes=NBYTES,
        kind=CopyKind.HOST_TO_DEVICE,
        stream=None,
    )
    assert read(backend, address, NBYTES) == source.raw
    pool.give(address)


def test_event_when_never_recorded_then_already_passed(backend: Backend) -> None:
    event = backend.event()
    assert event.query()
    event.synchronize()


def test_event_when_recorded_again_and_again_then_passed_after_each(backend: Backend) -> None:
    stream, event = backend.stream(), backend.event()
    for _ in range(5):
        event.record(stream)
        event.synchronize()
        assert event.query()
    event.record(None)
    event.synchronize()
    assert event.query()


def test_wait_when_one_stream_writes_and_another_reads_then_ordered(
    backend: Backend, pool: Pool
) -> None:
    writer, reader, event = backend.stream(), backend.stream(), backend.event()
    address = pool.take(NBYTES, writer)
    target = ctypes.create_string_buffer(NBYTES)
    for seed in range(20):
        source = ctypes.create_string_buffer(pattern(NBYTES, seed), NBYTES)
        backend.copy(
            to=address,
            source=ctypes.addressof(source),
            nbytes=NBYTES,
            kind=CopyKind.HOST_TO_DEVICE,
            stream=writer,
        )
        event.record(writer)
        reader.wait(event)
        backend.copy(
            to=ctypes.addressof(target),
            source=address,
            nbytes=NBYTES,
            kind=CopyKind.DEVICE_TO_HOST,
            stream=reader,
        )
        reader.synchronize()
        assert target.raw == source.raw
    pool.give(address)


def test_close_when_streams_and_events_are_open_then_they_work_until_closed(
    backend: Backend,
) -> None:
    stream, event = backend.stream(), backend.event()
    backend.close()
    backend.close()  # again: nothing happens
    with pytest.raises(InvalidArgument, match="backend is closed"):
        backend.memory_info()
    event.record(stream)
    event.synchronize()
    assert event.query()
    stream.synchronize()
    stream.close()
    event.close()
    assert stream.closed
    assert event.closed


def test_close_when_a_pool_is_open_then_it_works_until_closed(backend: Backend) -> None:
    opened = Pool(backend)
    backend.close()
    opened.give(opened.take(KIB))
    opened.close()
