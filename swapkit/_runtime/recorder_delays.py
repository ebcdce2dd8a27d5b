"""Keeping a device's streams busy, so that what they are given next waits for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.guards import hidden

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY_CYCLES = 4_000_000  # 2 ms at 2 GHz: longer than the call of an operator that is recorded
DELAY_SECONDS = 2e-3
# Of a device that cannot sleep: two such matrices, of 4 MiB each, are multiplied for some 50 us.
_WIDTH = 1024
_SAMPLES = 8
_MOST_PRODUCTS = 512


def is_capturing(device: torch.device) -> bool:
    """Return whether what this thread's stream is given now becomes part of a graph."""
    look = getattr(getattr(torch, device.type), "is_current_stream_capturing", None)
    return look is not None and bool(look())


class Delays:
    """Puts delays into streams. Any thread.

    Two are enough to keep a stream busy for at least one: before the latest, that is where another
    one is put in, begins no earlier than the one before has ended.
    """

    def __init__(self, device: torch.device) -> None:
        """Put none in as yet."""
        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._delay: Callable[[], None] | None = None
        # By the stream's number: an event just before the latest delay. Asking a stream of torch's
        # for more than that may wait for what the host has queued (`torch_npu`).
        self._latest: dict[int, Any] = {}

    def cover(self, stream: Any) -> None:  # noqa: ANN401 - a stream of the module's
        """Let what a stream is given next begin no earlier than one delay from now."""
        latest = self._latest.get(stream.stream_id)
        if latest is not None and not latest.query():
            return
        with self._module.stream(stream):
            if self._delay is None:
                self._delay = self._make_delay()
            event = self._latest[stream.stream_id] = self._module.Event()
            event.record(stream)
            self._delay()

    def drop(self) -> None:
        """Let go of memory, once the device has computed."""
        self._delay = None
        self._latest.clear()

    def _make_delay(self) -> Callable[[], None]:
        sleep = getattr(self._module, "_sleep", None)
        if sleep is not None:
            return lambda: sleep(DELAY_CYCLES)
        try:
            return self._make_products()
        except torch.OutOfMemoryError:
            return lambda: None

    def _make_products(self) -> Callable[[], None]:
        """Return what computes for as long as a delay, since the device cannot sleep."""
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
        seconds = events[0].elapsed_time(events[1]) / 1e3 / _SAMPLES
        count = min(_MOST_PRODUCTS, int(DELAY_SECONDS / max(seconds, 1e-9)) + 1)
        return lambda: multiply(count)
