"""How long each operator of a recorded step takes, and what it takes of memory besides."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swapkit._native.pool import Pool, Ring, RingKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._runtime.cost_model import Hardware
    from swapkit._runtime.device import DevicePool
    from swapkit._runtime.operators import Operator

_RING_EVENTS = 1 << 16
_READ_EVERY = 1 << 11  # operators
_OURS = 1  # in the place of bytes: not the mark of somebody else's operator
NO_WORKSPACE = -1
DELAY_CYCLES = 4_000_000  # 2 ms at 2 GHz: longer than the call of an operator that is recorded


class Timer(Protocol):
    """Takes the time of operators, each between `begin` and `end`."""

    def begin(self) -> Any:  # noqa: ANN401 - its own
        """Note that an operator begins."""

    def end(self, begun: Any, call: tuple[Operator, Any, Any], result: object) -> Any:  # noqa: ANN401
        """Note that it has ended; return what stands for its time."""

    def nothing(self) -> Any:  # noqa: ANN401 - its own
        """Return what stands for no time."""

    def seconds(self, taken: Sequence[Any]) -> list[float]:
        """Return the times that some operators took."""


class HostTimer:
    """For a device that has computed when the call returns."""

    def begin(self) -> float:
        """Return the time now."""
        return time.perf_counter()

    def end(self, begun: float, _call: object, _result: object) -> float:
        """Return the seconds since."""
        return time.perf_counter() - begun

    def nothing(self) -> float:
        """Return no seconds."""
        return 0.0

    def seconds(self, taken: Sequence[float]) -> list[float]:
        """Return them as they are."""
        return list(taken)


class StoppedClock(HostTimer):
    """Stands still while memory is made: not the operators take that time that allocate."""

    def __init__(self, spent: Callable[[], float]) -> None:
        """Stand still for the seconds that `spent` returns."""
        self._spent = spent  # seconds so far

    def begin(self) -> float:
        """Return the time now."""
        return super().begin() - self._spent()

    def end(self, begun: float, _call: object, _result: object) -> float:
        """Return the seconds since."""
        return super().begin() - self._spent() - begun


class StreamTimer:
    """For a device that computes in streams: by events on the running one.

    Whoever records calls operators more slowly than a device computes them. One that waits for the
    next would count that time, so it is kept busy: before the latest delay has ended, which the
    stream is given between operators, it has got another one.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = getattr(torch, device.type)
        self._delay: Callable[[int], None] | None = getattr(self._module, "_sleep", None)
        self._delayed: Any = None  # an event just before the latest delay

    def begin(self) -> Any:  # noqa: ANN401 - an event
        """Record an event."""
        if self._delay is not None and (self._delayed is None or self._delayed.query()):
            self._delayed = self._record(enable_timing=False)
            self._delay(DELAY_CYCLES)
        return self._record(enable_timing=True)

    def end(self, begun: Any, _call: object, _result: object) -> tuple[Any, Any]:  # noqa: ANN401
        """Record another."""
        return begun, self._record(enable_timing=True)

    def nothing(self) -> None:
        """Return no events."""

    def _record(self, *, enable_timing: bool) -> Any:  # noqa: ANN401 - an event
        event = self._module.Event(enable_timing=enable_timing)
        event.record()
        return event

    def seconds(self, taken: Sequence[tuple[Any, Any] | None]) -> list[float]:
        """Wait for the device; return the times between the events."""
        self._module.synchronize()
        return [0.0 if pair is None else pair[0].elapsed_time(pair[1]) / 1e3 for pair in taken]


class ModelTimer:
    """For tensors without memory: by a model of the hardware that they stand for."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def begin(self) -> None:
        """Nothing runs."""

    def end(self, _begun: None, call: tuple[Operator, Any, Any], result: object) -> float:
        """Return the seconds that the hardware would take."""
        function, args, kwargs = call
        return self._hardware.seconds(function, args, kwargs, result)

    def nothing(self) -> float:
        """Return no seconds."""
        return 0.0

    def seconds(self, taken: Sequence[float]) -> list[float]:
        """Return them as they are."""
        return list(taken)


class Workspaces:
    """What the pool hands out while an operator runs and takes back before it ends.

    From the pool's ring of events; nothing is known where somebody else reads that.
    """

    def __init__(self, pool: DevicePool | None) -> None:
        self._pool = pool if isinstance(pool, Pool) and not pool.has_ring else None
        self._ring: Ring | None = None
        self.after: list[int] = []  # by call of `end`: bytes in use then
        self._workspaces: list[int] = []  # likewise
        self._most = self._before = 0
        self._begun = 0
        self._lost = False

    def start(self) -> None:
        """Begin to record."""
        if self._pool is not None:
            self._ring = Ring(_RING_EVENTS)
            self._pool.attach(self._ring)

    def stop(self) -> None:
        """End recording; calls after the first do nothing."""
        if self._ring is not None and self._pool is not None:
            self._pool.detach()
            self._read()
            self._ring = None

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self._ring is not None

    def begin(self) -> None:
        """Note that an operator begins."""
        assert self._pool is not None
        self._begun += 1
        if self._begun % _READ_EVERY == 0:
            self._read()
        self._pool.note(RingKind.OP_BEGIN, _OURS)

    def end(self) -> int:
        """Note that it has ended; return by what number `bytes_of` knows it."""
        assert self._pool is not None
        self._pool.note(RingKind.OP_END, _OURS)
        return self._begun - 1

    def bytes_of(self, number: int) -> int:
        """Return the workspace of an operator; 0 where nothing is known."""
        is_known = not self._lost and 0 <= number < len(self._workspaces)
        return self._workspaces[number] if is_known else 0

    def _read(self) -> None:
        assert self._ring is not None
        events, lost = self._ring.read()
        self._lost = self._lost or lost > 0  # then it is not known whose the others are
        for event in events:
            self._most = max(self._most, event.in_use_bytes)
            if event.nbytes != _OURS:
                continue
            if event.kind is RingKind.OP_BEGIN:
                self._most = self._before = event.in_use_bytes
            elif event.kind is RingKind.OP_END:
                self.after.append(event.in_use_bytes)
                self._workspaces.append(self._most - max(self._before, event.in_use_bytes))
