"""The time of each operator of a recorded step."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from swapkit._runtime.operators.names import Operator
from swapkit._runtime.torch_compat.stream_delays import (
    DELAY_SECONDS,
    Delays,
    LongCalls,
    is_capturing,
)

_EMPTY_PAIRS = 16


class Timer:
    """Times operators, each from `begin` to `end` or `abandon` on one thread.

    In between, the thread may begin another operator, in a finalizer. The pool calls `stop` and
    `go_on` there around work that is not part of the operator, such as making memory for an
    allocation. It holds none of its locks then, but the thread may hold its own. The two must not
    need memory from the pool.
    """

    # Indices into the latest `seconds`: times that may include waiting.
    doubtful: frozenset[int] = frozenset()

    def expect(self, function: Operator) -> None:
        """Prepare for an operator that this thread is about to run."""

    def begin(self) -> Any:  # noqa: ANN401 - the timer's own
        """Note that an operator begins; return a handle for `end`."""
        raise NotImplementedError

    def end(self, begun: Any, function: Operator) -> Any:  # noqa: ANN401
        """Note that the operator has ended; return a handle to its time, for `seconds`."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Note that the operator this thread began last has raised."""

    def stop(self) -> None:
        """Pause the time of this thread's operators."""

    def go_on(self) -> None:
        """Resume the time of this thread's operators, if any run."""

    def nothing(self) -> Any:  # noqa: ANN401 - the timer's own
        """Return a handle to a time of zero."""
        raise NotImplementedError

    def seconds(self, taken: Sequence[Any]) -> list[float]:
        """Return the times of some operators, from their handles."""
        raise NotImplementedError


class HostTimer(Timer):
    """A timer for a device that has computed when the call returns."""

    def __init__(self) -> None:
        """Start without pauses."""
        self._stopped: dict[int, float] = {}  # by thread: total seconds paused so far
        self._since: dict[int, float] = {}

    def begin(self) -> float:
        """Return this thread's clock, without pauses."""
        return time.perf_counter() - self._stopped.get(threading.get_ident(), 0.0)

    def end(self, begun: float, _function: object) -> float:
        """Return the seconds since `begun`."""
        return self.begin() - begun

    def stop(self) -> None:
        """Stop this thread's clock."""
        self._since[threading.get_ident()] = time.perf_counter()

    def go_on(self) -> None:
        """Restart this thread's clock."""
        thread = threading.get_ident()
        since = self._since.pop(thread, None)
        if since is not None:
            seconds = time.perf_counter() - since
            self._stopped[thread] = self._stopped.get(thread, 0.0) + seconds

    def nothing(self) -> float:
        """Return 0 seconds."""
        return 0.0

    def seconds(self, taken: Sequence[float]) -> list[float]:
        """Return the handles: they are the times."""
        return list(taken)


class _TimedOperator:
    """The events of one operator in its stream."""

    __slots__ = (
        "begun",
        "certain_seconds",
        "delay",
        "ended",
        "pauses",
        "since",
        "stopped",
        "stream",
        "thread",
    )

    def __init__(self, stream: Any, delay: float) -> None:  # noqa: ANN401 - of torch's module
        self.stream = stream
        self.thread = threading.get_ident()
        self.delay = delay  # seconds queued on the stream at the start, or at the last resume
        self.since = 0.0  # host clock at the start, or at the last resume
        self.certain_seconds = (
            math.inf
        )  # above this, the time may include the stream's wait for the call
        self.begun: Any = None
        self.ended: Any = None
        self.pauses: list[tuple[Any, Any]] = []  # not part of its time
        self.stopped: Any = None  # the first event of a pause that has not ended

    def milliseconds(self) -> float:
        """Return the operator's time, once the device has computed."""
        paused = sum(first.elapsed_time(last) for first, last in self.pauses)
        return float(self.begun.elapsed_time(self.ended) - paused)


class StreamTimer(Timer):
    """A timer for a device with streams: records events on the stream that an operator runs in.

    A recorder calls operators more slowly than the device computes them. If the stream waited for
    the next call, the wait would count as operator time. So delays keep the stream busy
    (`torch_compat/stream_delays.py`). Where a call outlasts its delay because memory is made, two
    more events, the second behind another delay, measure that wait. A call that outlasts its delay
    by itself is doubtful, and its operator gets a longer delay the next time. The call is not
    doubtful if its operator is already known to wait for the stream, and it takes no longer than
    such a wait. Later findings prove nothing about an earlier call, which may have been slow.

    While a graph is captured nothing runs, and events and delays would become part of the graph.
    A capture may begin or end anywhere, so each method checks.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without recorded events."""
        self.doubtful: frozenset[int] = frozenset()
        self.long_calls = LongCalls()
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._delays = Delays(device)
        # By thread: its running operators, innermost last; None: begun while a graph is captured.
        self._running: dict[int, list[_TimedOperator | None]] = {}
        self._expected: dict[int, float] = {}  # by thread: the delay for the next operator
        self._empty: list[Any] = []  # events with nothing in between

    def expect(self, function: Operator) -> None:
        """Keep the stream busy for the length of the operator's call, if the call is long."""
        seconds = self.long_calls.seconds(function)
        self._expected[threading.get_ident()] = seconds
        if seconds and not is_capturing(self._device):
            self._delays.cover(self._module.current_stream(self._device), seconds)

    def begin(self) -> _TimedOperator | None:
        """Record the operator's first event."""
        thread = threading.get_ident()
        expected = self._expected.pop(thread, 0.0)
        running = None
        if not is_capturing(self._device):
            running = self._start(self._module.current_stream(self._device), expected)
        self._running.setdefault(thread, []).append(running)
        return running

    def _start(self, stream: Any, expected: float) -> _TimedOperator:  # noqa: ANN401 - torch's
        running = _TimedOperator(stream, expected or DELAY_SECONDS)
        if not expected:  # a second delay would hide how the call depends on the longer one
            self._delays.cover(stream)
        if not self._empty:
            self._empty = [self._record(running) for _ in range(_EMPTY_PAIRS + 1)]
        running.begun = self._record(running)
        running.since = time.perf_counter()
        return running

    def end(self, begun: _TimedOperator | None, function: Operator) -> _TimedOperator | None:
        """Record the operator's last event, on any thread."""
        if begun is None:
            self.abandon()
        else:
            self._leave(begun.thread)
        if begun is None or is_capturing(self._device):
            return None
        begun.ended = self._record(begun)
        latest = begun.pauses[-1][1] if begun.pauses else begun.begun
        if latest.query():  # the delay is over: the stream may have waited since
            self.long_calls.add(function, time.perf_counter() - begun.since, begun.delay)
            begun.certain_seconds = self.long_calls.certain_seconds(function)
        return begun

    def abandon(self) -> None:
        """Remove the latest operator of this thread, so that later pauses do not count for it."""
        self._leave(threading.get_ident())

    def _leave(self, thread: int) -> None:
        mine = self._running.get(thread)
        if mine:
            mine.pop()
        if not mine:
            self._running.pop(thread, None)

    def stop(self) -> None:
        """Record an event where the stream may begin to wait for this thread."""
        for running in self._paused_now():
            running.stopped = self._record(running)

    def go_on(self) -> None:
        """Record an event where the stream no longer waits for this thread."""
        for running in self._paused_now():
            if running.stopped is not None:
                self._delays.cover(running.stream)
                running.pauses.append((running.stopped, self._record(running)))
                running.stopped = None
                running.delay = DELAY_SECONDS
                running.since = time.perf_counter()

    def _paused_now(self) -> list[_TimedOperator]:
        """Return all operators of this thread: the outer ones wait with the innermost."""
        mine = [each for each in self._running.get(threading.get_ident(), ()) if each is not None]
        return [] if mine and is_capturing(self._device) else mine

    def nothing(self) -> None:
        """Return None: no events."""

    def _record(self, running: _TimedOperator) -> Any:  # noqa: ANN401 - an event
        event = self._module.Event(enable_timing=True)
        event.record(running.stream)
        return event

    def seconds(self, taken: Sequence[_TimedOperator | None]) -> list[float]:
        """Wait for the device; return the times between events, less the cost of an event."""
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
