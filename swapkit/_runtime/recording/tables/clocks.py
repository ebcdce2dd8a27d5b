"""How long each operator of a recorded step takes, and what it takes of memory besides."""

from __future__ import annotations

import math
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from swapkit._native.pool import Pool, Ring, RingKind
from swapkit._runtime.torch_compat.stream_delays import (
    DELAY_SECONDS,
    Delays,
    LongCalls,
    is_capturing,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.operators.names import Operator
    from swapkit._runtime.recording.tables.roofline import Hardware
    from swapkit._runtime.saved.device import DevicePool

_RING_EVENTS = 1 << 16
_READ_EVERY = 1 << 11  # operators
_OURS = 1  # in the place of bytes: not the mark of somebody else's operator
NO_WORKSPACE = -1
_EMPTY_PAIRS = 16


class Timer:
    """Takes the time of operators, each between `begin` and `end` or `abandon` on one thread.

    A thread may begin another operator in between: a finalizer's. In between, `stop` and `go_on`
    are called there around what is no part of the operator: memory is made for what it allocates.
    No lock of the pool's is held, but whatever the thread itself holds, and nothing of what the
    pool hands out may be needed.
    """

    # Of the `seconds` asked for: those that may hold waiting, too.
    doubtful: frozenset[int] = frozenset()

    def expect(self, function: Operator) -> None:
        """This thread is about to run an operator."""

    def begin(self) -> Any:  # noqa: ANN401 - its own
        """Note that it begins."""
        raise NotImplementedError

    def end(self, begun: Any, call: tuple[Operator, Any, Any], result: object) -> Any:  # noqa: ANN401
        """Note that it has ended; return what stands for its time."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Note that it has raised: the one that this thread has begun last."""

    def stop(self) -> None:
        """This thread does something else from here on."""

    def go_on(self) -> None:
        """It goes on with its operator, if it is in one."""

    def nothing(self) -> Any:  # noqa: ANN401 - its own
        """Return what stands for no time."""
        raise NotImplementedError

    def seconds(self, taken: Sequence[Any]) -> list[float]:
        """Return the times that some operators took."""
        raise NotImplementedError


class HostTimer(Timer):
    """For a device that has computed when the call returns."""

    def __init__(self) -> None:
        """Begin with no time."""
        self._stopped: dict[int, float] = {}  # by thread: how long it stood still, so far
        self._since: dict[int, float] = {}

    def begin(self) -> float:
        """Return this thread's time now."""
        return time.perf_counter() - self._stopped.get(threading.get_ident(), 0.0)

    def end(self, begun: float, _call: object, _result: object) -> float:
        """Return the seconds since."""
        return self.begin() - begun

    def stop(self) -> None:
        """Let this thread's time stand still."""
        self._since[threading.get_ident()] = time.perf_counter()

    def go_on(self) -> None:
        """Let it go on."""
        thread = threading.get_ident()
        since = self._since.pop(thread, None)
        if since is not None:
            seconds = time.perf_counter() - since
            self._stopped[thread] = self._stopped.get(thread, 0.0) + seconds

    def nothing(self) -> float:
        """Return no seconds."""
        return 0.0

    def seconds(self, taken: Sequence[float]) -> list[float]:
        """Return them as they are."""
        return list(taken)


class _TimedOperator:
    """An operator that runs, or ran: events in its stream."""

    __slots__ = (
        "begun",
        "certain_seconds",
        "delay",
        "ended",
        "pauses",
        "since",
        "stopped",
        "stream",
    )

    def __init__(self, stream: Any, delay: float) -> None:  # noqa: ANN401 - of torch's module
        self.stream = stream
        self.delay = delay  # in seconds: what the stream has to do when it began, or went on
        self.since = 0.0  # by the host's clock: begun, or gone on
        self.certain_seconds = (
            math.inf
        )  # if it took longer, the stream may have waited for the call
        self.begun: Any = None
        self.ended: Any = None
        self.pauses: list[tuple[Any, Any]] = []  # what lies between is not its time
        self.stopped: Any = None  # the first event of a pause that has not ended

    def milliseconds(self) -> float:
        """Return how long it took, once the device has computed."""
        paused = sum(first.elapsed_time(last) for first, last in self.pauses)
        return float(self.begun.elapsed_time(self.ended) - paused)


class StreamTimer(Timer):
    """For a device that computes in streams: by events on the one that an operator runs in.

    Whoever records calls operators more slowly than a device computes them. A stream that waits for
    the next would count that time, so it is kept busy (`torch_compat/stream_delays.py`). Where a
    call takes longer than a delay because memory is made, two more events, the latter behind
    another delay, tell how long the stream waited for that. A call that takes longer by itself is
    doubtful, and its operator has a longer delay the next time; unless it is known by then that
    this operator waits for the stream, and it takes no longer than such a call can. What is found
    out later proves nothing about it: it may have been slow.

    While a graph is captured nothing runs: events there would be the graph's, and so would delays.
    A capture may begin or end anywhere, so each call looks.
    """

    def __init__(self, device: torch.device) -> None:
        """Record nothing yet."""
        self.doubtful: frozenset[int] = frozenset()
        self.long_calls = LongCalls()
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._delays = Delays(device)
        # By thread: those that it is in, the innermost last; None: begun while a graph is captured.
        self._running: dict[int, list[_TimedOperator | None]] = {}
        self._expected: dict[int, float] = {}  # by thread: the delay for the next operator
        self._empty: list[Any] = []  # events with nothing in between

    def expect(self, function: Operator) -> None:
        """Keep the stream busy for as long as its call takes, if that is long."""
        seconds = self.long_calls.seconds(function)
        self._expected[threading.get_ident()] = seconds
        if seconds and not is_capturing(self._device):
            self._delays.cover(self._module.current_stream(self._device), seconds)

    def begin(self) -> _TimedOperator | None:
        """Record an event."""
        thread = threading.get_ident()
        expected = self._expected.pop(thread, 0.0)
        running = None
        if not is_capturing(self._device):
            running = self._start(self._module.current_stream(self._device), expected)
        self._running.setdefault(thread, []).append(running)
        return running

    def _start(self, stream: Any, expected: float) -> _TimedOperator:  # noqa: ANN401 - torch's
        running = _TimedOperator(stream, expected or DELAY_SECONDS)
        if not expected:  # another delay would hide how the call depends on the longer one
            self._delays.cover(stream)
        if not self._empty:
            self._empty = [self._record(running) for _ in range(_EMPTY_PAIRS + 1)]
        running.begun = self._record(running)
        running.since = time.perf_counter()
        return running

    def end(
        self, begun: _TimedOperator | None, call: tuple[Operator, Any, Any], _result: object
    ) -> _TimedOperator | None:
        """Record another."""
        self.abandon()
        if begun is None or is_capturing(self._device):
            return None
        begun.ended = self._record(begun)
        latest = begun.pauses[-1][1] if begun.pauses else begun.begun
        if latest.query():  # the delay is over: the stream may have waited since
            self.long_calls.add(call[0], time.perf_counter() - begun.since, begun.delay)
            begun.certain_seconds = self.long_calls.certain_seconds(call[0])
        return begun

    def abandon(self) -> None:
        """Forget the latest operator of this thread: what it does from here on is not its own."""
        thread = threading.get_ident()
        mine = self._running.get(thread)
        if mine:
            mine.pop()
        if not mine:
            self._running.pop(thread, None)

    def stop(self) -> None:
        """Record where the stream may begin to wait for this thread."""
        for running in self._paused_now():
            running.stopped = self._record(running)

    def go_on(self) -> None:
        """Record where it no longer does."""
        for running in self._paused_now():
            if running.stopped is not None:
                self._delays.cover(running.stream)
                running.pauses.append((running.stopped, self._record(running)))
                running.stopped = None
                running.delay = DELAY_SECONDS
                running.since = time.perf_counter()

    def _paused_now(self) -> list[_TimedOperator]:
        """Return what this thread is in: the outer ones wait for what an inner one waits for."""
        mine = [each for each in self._running.get(threading.get_ident(), ()) if each is not None]
        return [] if mine and is_capturing(self._device) else mine

    def nothing(self) -> None:
        """Return no events."""

    def _record(self, running: _TimedOperator) -> Any:  # noqa: ANN401 - an event
        event = self._module.Event(enable_timing=True)
        event.record(running.stream)
        return event

    def seconds(self, taken: Sequence[_TimedOperator | None]) -> list[float]:
        """Wait for the device; return the times between the events, without what these take."""
        self._delays.finish()
        between = [
            first.elapsed_time(last)
            for first, last in zip(self._empty, self._empty[1:], strict=False)
        ]
        empty = statistics.median(between) if between else 0.0
        found = [
            0.0 if each is None else max(0.0, each.milliseconds() - empty) / 1e3 for each in taken
        ]
        self.doubtful = frozenset(
            number
            for number, (each, seconds) in enumerate(zip(taken, found, strict=True))
            if each is not None and seconds >= each.certain_seconds
        )
        return found


class ModelTimer(Timer):
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
