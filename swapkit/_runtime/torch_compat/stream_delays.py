"""Keeping a device's streams busy, so that what they are given next waits for nobody."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.torch_compat.internals import InferenceMode
from swapkit._runtime.torch_compat.isolation import hidden

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY_SECONDS = 2e-3  # longer than the call of most operators that are recorded
LONGEST_SECONDS = 16e-3
_PROOFS = 2
_CYCLES_PER_SECOND = 2e9
# Of a device that cannot sleep: two such matrices, of 4 MiB each, are multiplied for some 50 us.
_WIDTH = 1024
_SAMPLES = 8
_LEAST_SECONDS = 1e-5  # of a product: shorter, the host calls no faster than the device computes


def is_capturing(device: torch.device) -> bool:
    """Return whether what this thread's stream is given now becomes part of a graph."""
    look = getattr(getattr(torch, device.type), "is_current_stream_capturing", None)
    return look is not None and bool(look())


class _LongCall(NamedTuple):
    """What is known of an operator: its latest call that outlasted a delay."""

    call_seconds: float
    delay_seconds: float  # before it
    wanted: float  # the delay for the next one
    follows: int  # how many calls in a row were longer, or shorter, by what the delay was


class LongCalls:
    """Operators whose calls outlast a delay, and how long a delay would be enough. Any thread.

    There are two kinds. A call that is slow by itself, as one that loads code, takes as long behind
    any delay. One that waits for the stream returns soon after the delay, however long that is.
    Slow calls differ from each other, and so may look like that by chance: it takes two changes of
    the delay in a row.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._known: dict[object, _LongCall] = {}

    def seconds(self, function: object) -> float:
        """Return how long a delay an operator needs; 0: any, or none is enough."""
        known = self._known.get(function)
        return 0.0 if known is None or known.follows >= _PROOFS else known.wanted

    def certain_seconds(self, function: object) -> float:
        """Return below what time a call that has outlasted its delay holds no waiting; 0: never.

        A call that waits for the stream may be slow besides, and one that is slow by itself may be
        taken for one that waits: what it takes beyond a call that proved it is not its own.
        """
        known = self._known.get(function)
        if known is None or known.follows < _PROOFS:
            return 0.0
        return known.call_seconds - known.delay_seconds + DELAY_SECONDS

    def add(self, function: object, call_seconds: float, delay_seconds: float) -> None:
        """Note a call that has outlasted the delay before it."""
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
            wanted = DELAY_SECONDS  # one that waits takes less the next time
        wanted = min(LONGEST_SECONDS, wanted)
        self._known[function] = _LongCall(call_seconds, delay_seconds, wanted, follows)


class Delays:
    """Puts delays into streams. Any thread.

    Two are enough to keep a stream busy for at least one: before the latest has begun, no other one
    is put in.

    The recorder may be stopped while an operator of another thread begins. That one keeps what it
    has found, so that it neither fails nor has memory taken away that the device computes with, and
    leaves nothing behind.
    """

    def __init__(self, device: torch.device) -> None:
        """Put none in as yet."""
        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._is_over = threading.Event()  # once set, for good: before anything is let go of
        # The first one is taken. Others, made on several threads at once, stay until the end, too.
        self._made: list[Callable[[float], None]] = []
        # By the stream's number: an event just before the latest delay, and how long that is.
        # Asking a stream of torch's for more than its number may wait for what the host has queued
        # (`torch_npu`).
        self._latest: dict[int, tuple[Any, float]] = {}

    def cover(self, stream: Any, seconds: float = DELAY_SECONDS) -> None:  # noqa: ANN401 - torch's
        """Let what a stream is given next begin no earlier than so long from now."""
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
                self.finish()  # `made` is this thread's alone by now, or is about to be

    def finish(self) -> None:
        """Put nothing in from now on; wait for the device, then let go of memory."""
        self._is_over.set()
        self._module.synchronize(self._device)
        self._made = []
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
