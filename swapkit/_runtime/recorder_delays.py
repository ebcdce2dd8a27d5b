"""Keeping a device's streams busy, so that what they are given next waits for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.guards import hidden

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY_SECONDS = 2e-3  # longer than the call of most operators that are recorded
LONGEST_SECONDS = 16e-3
_CYCLES_PER_SECOND = 2e9
# Of a device that cannot sleep: two such matrices, of 4 MiB each, are multiplied for some 50 us.
_WIDTH = 1024
_SAMPLES = 8
_LEAST_SECONDS = 1e-5  # of a product: shorter, the host calls no faster than the device computes


def is_capturing(device: torch.device) -> bool:
    """Return whether what this thread's stream is given now becomes part of a graph."""
    look = getattr(getattr(torch, device.type), "is_current_stream_capturing", None)
    return look is not None and bool(look())


class LongCalls:
    """Operators whose calls outlast a delay, and how long a delay would be enough. Any thread."""

    def __init__(self) -> None:
        """Know of none."""
        self._seconds: dict[object, float] = {}

    def seconds(self, function: object) -> float:
        """Return how long a delay an operator needs; 0: any, or none is enough."""
        return self._seconds.get(function, 0.0)

    def waits(self, function: object) -> bool:
        """Return whether it waits for the stream itself: so it always does, recorded or not."""
        return self._seconds.get(function) == 0.0

    def add(self, function: object, call_seconds: float) -> None:
        """Note a call that has outlasted the delay before it."""
        known = self._seconds.get(function, DELAY_SECONDS)
        is_enough = known < LONGEST_SECONDS and not self.waits(function)
        wanted = max(2 * call_seconds, 2 * known)
        self._seconds[function] = min(LONGEST_SECONDS, wanted) if is_enough else 0.0


class Delays:
    """Puts delays into streams. Any thread.

    Two are enough to keep a stream busy for at least one: before the latest has begun, no other one
    is put in.
    """

    def __init__(self, device: torch.device) -> None:
        """Put none in as yet."""
        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._delay: Callable[[float], None] | None = None
        # By the stream's number: an event just before the latest delay, and how long that is.
        # Asking a stream of torch's for more than its number may wait for what the host has queued
        # (`torch_npu`).
        self._latest: dict[int, tuple[Any, float]] = {}

    def cover(self, stream: Any, seconds: float = DELAY_SECONDS) -> None:  # noqa: ANN401 - torch's
        """Let what a stream is given next begin no earlier than so long from now."""
        event, length = self._latest.get(stream.stream_id, (None, 0.0))
        if length >= seconds and not event.query():
            return
        with self._module.stream(stream):
            if self._delay is None:
                self._delay = self._make_delay()
            event = self._module.Event()
            self._latest[stream.stream_id] = event, seconds
            event.record(stream)
            self._delay(seconds)

    def drop(self) -> None:
        """Let go of memory, once the device has computed."""
        self._delay = None
        self._latest.clear()

    def _make_delay(self) -> Callable[[float], None]:
        sleep = getattr(self._module, "_sleep", None)
        if sleep is not None:
            return lambda seconds: sleep(int(seconds * _CYCLES_PER_SECOND))
        try:
            return self._make_products()
        except torch.OutOfMemoryError:
            return lambda _seconds: None

    def _make_products(self) -> Callable[[float], None]:
        """Return what computes for so long, since the device cannot sleep."""
        with hidden(), torch.inference_mode(False):  # noqa: FBT003 - torch's
            matrix = torch.zeros(_WIDTH, _WIDTH, device=self._device)
            product = torch.zeros_like(matrix)

        def multiply(count: int) -> None:
            with hidden(), torch.no_grad():
                for _ in range(count):
                    torch.mm(matrix, matrix, out=product)

        multiply(1)
        events = [self._module.Event(enable_timing=True) for _ in range(2)]
        multiply(_SAMPLES)  # the device computes while the host calls
        events[0].record()
        multiply(_SAMPLES)
        events[1].record()
        self._module.synchronize(self._device)
        each = max(_LEAST_SECONDS, events[0].elapsed_time(events[1]) / 1e3 / _SAMPLES)
        return lambda seconds: multiply(int(seconds / each) + 1)
