"""Backend, Stream and Event: what they answer, and what they say when misused."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import Backend, CopyKind
from swapkit._native.lib import lib
from swapkit.errors import BackendError, InvalidArgument, OutOfDeviceMemory, OutOfHostMemory
from tests.support.instruments import Instrument

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
NBYTES = 1024


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend.cpu(capacity_bytes=64 * MIB) as opened:
        yield opened


class Copy:
    """A copy between two host buffers."""

    def __init__(self) -> None:
        self.source = ctypes.create_string_buffer(b"x" * NBYTES, NBYTES)
        self.target = ctypes.create_string_buffer(NBYTES)

    def start(self, backend: Backend, stream: object) -> None:
        backend.copy(
            to=ctypes.addressof(self.target),
            source=ctypes.addressof(self.source),
            nbytes=NBYTES,
            kind=CopyKind.DEVICE_TO_HOST,
            stream=stream,  # type: ignore[arg-type]
        )

    @property
    def done(self) -> bool:
        return self.target.raw == self.source.raw


def test_cpu_when_no_capacity_given_then_that_of_the_machine() -> None:
    with Backend.cpu() as backend:
        assert backend.memory_info().total_bytes > 64 * MIB
        assert backend.name == "cpu"


def test_cpu_when_capacity_is_absurd_then_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="capacity"):
        Backend.cpu(capacity_bytes=1 << 60)


@pytest.mark.parametrize(("granule_bytes", "expected"), [(1 << 16, 1 << 16), (2 << 20, 2 << 20)])
def test_cpu_when_granules_are_given_then_those(granule_bytes: int, expected: int) -> None:
    with Backend.cpu(granule_bytes=granule_bytes) as backend:
        assert backend.granule_bytes == expected


@pytest.mark.parametrize("granule_bytes", [100, 3 << 16, 4 << 20])
def test_cpu_when_granules_are_not_possible_then_invalid_argument(granule_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match=r"cpu'?( backend)?: granule"):
        Backend.cpu(granule_bytes=granule_bytes)


def test_delay_when_copy_is_held_then_event_waits_for_release() -> None:
    with Instrument.delay(Backend.cpu(capacity_bytes=MIB)) as backend:
        stream, event, copy = backend.stream(), backend.event(), Copy()
        copy.start(backend, stream)
        event.record(stream)
        assert not event.query()
        assert not copy.done
        backend.release_copies(1)
        event.synchronize()
        assert event.query()
        assert copy.done


def test_delay_when_all_are_released_then_later_copies_run_too() -> None:
    with Instrument.delay(Backend.cpu(capacity_bytes=MIB)) as backend:
        backend.release_copies()
        stream = backend.stream()
        for _ in range(3):
            copy = Copy()
            copy.start(backend, stream)
            stream.synchronize()
            assert copy.done


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (lib.SK_BACKEND_FAILED, BackendError),
        (lib.SK_OUT_OF_DEVICE_MEMORY, OutOfDeviceMemory),
        (lib.SK_OUT_OF_HOST_MEMORY, OutOfHostMemory),
    ],
)
def test_fault_when_armed_then_the_nth_call_raises_its_error(
    status: int, error: type[Exception]
) -> None:
    with Instrument.fault(Backend.cpu(capacity_bytes=MIB)) as backend:
        backend.arm_fault(2, forever=False, status=status)
        backend.memory_info()
        with pytest.raises(error, match="stream_create"):
            backend.stream()
        backend.stream()
        assert backend.fault_calls() == 3


def test_fault_when_forever_then_until_disarmed() -> None:
    with Instrument.fault(Backend.cpu(capacity_bytes=MIB)) as backend:
        backend.arm_fault(1, forever=True, status=lib.SK_BACKEND_FAILED)
        for _ in range(3):
            with pytest.raises(BackendError):
                backend.event()
        backend.arm_fault(0, forever=False, status=lib.SK_OK)
        backend.event()


def test_trace_when_calls_are_made_then_the_last_are_remembered() -> None:
    with Instrument.trace(Backend.cpu(capacity_bytes=MIB), 3) as backend:
        stream, copy = backend.stream(), Copy()
        backend.memory_info()
        copy.start(backend, stream)
        stream.synchronize()
        calls = backend.read_trace()
        assert [call.name for call in calls] == ["memory_info", "copy_async", "stream_sync"]
        assert [call.nbytes for call in calls] == [0, NBYTES, 0]
        assert {call.status for call in calls} == {"SK_OK"}


def test_trace_when_capacity_is_zero_then_invalid_and_inner_is_still_ours(backend: Backend) -> None:
    with pytest.raises(InvalidArgument, match="capacity of 0"):
        Instrument.trace(backend, 0)
    assert backend.memory_info().free_bytes == 64 * MIB


def test_wrapper_when_made_then_inner_handle_is_taken_over() -> None:
    inner = Backend.cpu(capacity_bytes=MIB)
    with Instrument.fault(inner) as outer:
        assert inner.closed
        with pytest.raises(InvalidArgument, match="backend is closed"):
            inner.memory_info()
        assert outer.name == "fault"


def test_stream_when_closed_then_use_is_refused(backend: Backend) -> None:
    stream = backend.stream()
    stream.close()
    stream.close()
    assert stream.closed
    with pytest.raises(InvalidArgument, match="stream is closed"):
        stream.synchronize()
    with pytest.raises(InvalidArgument, match="stream is closed"):
        Copy().start(backend, stream)


def test_event_when_closed_then_use_is_refused(backend: Backend) -> None:
    event = backend.event()
    event.close()
    with pytest.raises(InvalidArgument, match="event is closed"):
        event.query()
    with pytest.raises(InvalidArgument, match="event is closed"):
        event.record(None)


def test_backend_when_closed_then_every_use_is_refused() -> None:
    backend = Backend.cpu(capacity_bytes=MIB)
    backend.close()
    for use in (backend.memory_info, backend.stream, backend.event, lambda: backend.name):
        with pytest.raises(InvalidArgument, match="backend is closed"):
            use()


def test_event_when_dropped_while_recorded_then_nothing_breaks(backend: Backend) -> None:
    stream = backend.stream()
    for _ in range(100):
        event = backend.event()
        event.record(stream)
        del event
    gc.collect()
    stream.synchronize()


def test_stream_when_closed_with_work_queued_then_work_is_done(backend: Backend) -> None:
    stream, copy = backend.stream(), Copy()
    copy.start(backend, stream)
    stream.close()
    assert copy.done
