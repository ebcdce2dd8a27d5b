"""A device that computes in streams, whose clock a test keeps, and torch's module for it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CYCLES_PER_US = 2000


class Stream:
    """Does what it was given in order, as soon as it can."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.free_us = 0.0  # when all that was given is done


class Device:
    """The host's clock, and streams."""

    def __init__(self, *, event_us: float = 0.0) -> None:
        self.host_us = 0.0
        self.event_us = event_us  # of the stream, for each event
        self.current = Stream(0)
        self.is_capturing = False
        self.sleeps = 0

    def run(self, duration_us: float, stream: Stream | None = None) -> float:
        """Give a stream work; return when that is done."""
        stream = stream or self.current
        stream.free_us = max(stream.free_us, self.host_us) + duration_us
        return stream.free_us

    def wait(self) -> None:
        """Wait for the current stream."""
        self.host_us = max(self.host_us, self.current.free_us)


class Event:
    """Notes when a stream comes by."""

    def __init__(self, device: Device, *, enable_timing: bool = False) -> None:
        self._device = device
        self._is_timed = enable_timing
        self._us = 0.0

    def record(self, stream: Stream | None = None) -> None:
        assert not self._device.is_capturing
        self._us = self._device.run(self._device.event_us, stream)

    def query(self) -> bool:
        assert not self._device.is_capturing
        return self._us <= self._device.host_us

    def elapsed_time(self, other: Event) -> float:
        assert self._is_timed
        assert other._is_timed
        return (other._us - self._us) / 1e3


class Module:
    """As torch's for a device that cannot sleep."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.Event: Any = functools.partial(Event, device)

    def current_stream(self, _device: object) -> Stream:
        return self._device.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outer, self._device.current = self._device.current, stream
        yield
        self._device.current = outer

    def synchronize(self, _device: object) -> None:
        self._device.wait()

    def is_current_stream_capturing(self) -> bool:
        return self._device.is_capturing


class SleepingModule(Module):
    """As `torch.cuda`."""

    def _sleep(self, cycles: int) -> None:
        assert not self._device.is_capturing
        self._device.sleeps += 1
        self._device.run(cycles / CYCLES_PER_US)
