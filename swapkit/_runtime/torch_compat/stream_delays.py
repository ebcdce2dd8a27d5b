"""Keeping a device's streams busy, so that timed work does not include waiting for the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from swapkit._runtime.torch_compat.internals import InferenceMode
from swapkit._runtime.torch_compat.isolation import hidden

DELAY_SECONDS = 2e-3  # longer than the call of most operators that are recorded
LONGEST_SECONDS = 16e-3
_PROOFS = 2
_CYCLES_PER_SECOND = 2e9
# For a device that cannot sleep: multiplying two such matrices of 4 MiB each takes some 50 us.
_WIDTH = 1024
_SAMPLES = 8
_LEAST_SECONDS = 1e-5  # of a product: below this, the device may finish before the next call


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's current stream is capturing a graph."""
    look = getattr(getattr(torch, device.type), "is_current_stream_capturing", None)
    return look is not None and bool(look())


class _LongCall(NamedTuple):
    """An operator's latest call that outlasted its delay."""

    call_seconds: float
    delay_seconds: float  # before the call
    wanted: float  # the delay for the next call
    follows: int  # calls in a row whose length changed by the same amount as the delay


class LongCalls:
    """Operators whose calls outlast a delay, and the delays that they need. Any thread.

    There are two kinds. A call that is slow by itself, such as one that loads code, takes the same
    time behind any delay. A call that waits for the stream returns soon after the delay, however
    long the delay is. Slow calls vary, and may look like waiting calls by chance. So the proof of
    waiting takes two changes of the delay in a row.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[object, _LongCall] = {}

    def seconds(self, function: object) -> float:
        """Return the delay that an operator needs; 0: any delay is enough, or none is."""
        known = self._known.get(function)
        return 0.0 if known is None or known.follows >= _PROOFS else known.wanted

    def certain_seconds(self, function: object) -> float:
        """Return the time below which a call that outlasted its delay includes no wait; 0: never.

        A call that waits for the stream may also be slow, and a slow call may be mistaken for a
        waiting one. Time beyond that of the call that gave the proof may not be the operator's own.
        """
        known = self._known.get(function)
        if known is None or known.follows < _PROOFS:
            return 0.0
        return known.call_seconds - known.delay_seconds + DELAY_SECONDS

    def add(self, function: object, call_seconds: float, delay_seconds: float) -> None:
        """Note a call that outlasted the delay before it."""
        known = self._known.get(function)
        follows, wanted = 0, 2 * max(call_seconds, delay_seconds)
        is_near = call_seconds - delay_seconds < LONGEST_SECONDS / 2
        if known is not None:
            if known.follows >= _PROOFS:
                return
            changed = delay_seconds - known.delay_seconds
            off = call_seconds - known.call_seconds - changed
            follows = known.follows + 1 if is_near and abs(off) < abs(changed) / 2 else 0
            wanted = max(wanted, known.wanted)
        if is_near and delay_seconds >= LONGEST_SECONDS:
            wanted = DELAY_SECONDS  # a call that waits takes less time with this
        wanted = min(LONGEST_SECONDS, wanted)
        self._known[function] = _LongCall(call_seconds, delay_seconds, wanted, follows)


class Delays:
    """Puts delays into streams. Any thread.

    Two queued delays keep a stream busy for at least the length of one, so no delay is added while
    the latest has not begun.

    The recorder may stop while an operator begins on another thread. That thread keeps its
    reference to the delay function, so that it does not fail, and the memory that the device
    computes with is not freed. It leaves nothing behind.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without delays."""
        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._is_over = threading.Event()  # set before any memory is dropped, and never cleared
        # The first function is used. Others, made on several threads at once, stay until the end.
        self._made: list[Callable[[float], None]] = []
        # By stream id: an event just before the latest delay, and the length of that delay. Reading
        # more than the id from a torch stream may wait for the host's queue (`torch_npu`).
        self._latest: dict[int, tuple[Any, float]] = {}

    def cover(self, stream: Any, seconds: float = DELAY_SECONDS) -> None:  # noqa: ANN401 - torch's
        """Keep a stream busy for at least `seconds` from now."""
        if self._is_over.is_set():
            return
        event, length = self._latest.get(stream.stream_id, (None, 0.0))
        if length >= seconds and not event.query():
            return
        with self._module.stream(stream):
            made = self._made
            if not made:
                made.append(self._make_delay())
            event = self._module.Event()
            self._latest[stream.stream_id] = event, seconds
            event.record(stream)
            made[0](seconds)
            if self._is_over.is_set():
                self.finish()  # only this thread holds `made` now, or will soon

    def finish(self) -> None:
        """Stop adding delays; wait for the device, then drop the memory."""
        self._is_over.set()
        self._module.synchronize(self._device)
        self._made = []
        self._latest.clear()

    def _make_delay(self) -> Callable[[float], None]:
        sleep = getattr(self._module, "_sleep", None)
        if sleep is not None:
            with contextlib.suppress(RuntimeError):  # an operator that older CANNs do not have
                sleep(1)
                return lambda seconds: sleep(int(seconds * _CYCLES_PER_SECOND))
        try:
            return self._make_products()
        except torch.OutOfMemoryError:
            return lambda _seconds: None

    def _make_products(self) -> Callable[[float], None]:
        """Return a function that computes for a given time, for a device that cannot sleep."""
        with hidden(), InferenceMode(False):  # noqa: FBT003 - torch's
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
