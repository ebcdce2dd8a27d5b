"""The clock of operators, shared by all swappers: who wants to be woken where."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from swapkit._native.lib import call_back
from swapkit._runtime.guards import untraced

if TYPE_CHECKING:
    import threading

    from swapkit._runtime.shim import Shim
    from swapkit._runtime.timing import Timing

NEVER = -1
CLOCKS = 64  # `cpp/operators.cpp` has so many: more threads than that share them


class Clock:
    """Alarms at operators. It runs from its first use on."""

    def __init__(self, shim: Shim, lock: threading.RLock) -> None:
        self._shim = shim
        self._lock = lock
        # By a timing's id; each leaves when it goes, and its alarms with it.
        self._timings: dict[int, weakref.ref[Timing]] = {}
        # By clock: where it rings, by the id of a timing and the thread.
        self._forward: list[dict[tuple[int, int], int]] = [{} for _ in range(CLOCKS)]
        self._backward: list[dict[tuple[int, int], int]] = [{} for _ in range(CLOCKS)]
        self._is_running = False

    def attend(self, timing: Timing) -> int:
        """Let a timing be rung; return the number of the running thread."""
        if id(timing) not in self._timings:
            self._timings[id(timing)] = weakref.ref(timing, partial(self._forget, id(timing)))
        if not self._is_running:
            self._shim.start_clock(self._ring)
            self._is_running = True
        return self._shim.clock_thread()

    def set_forward(self, timing: Timing, thread: int, operator: int) -> None:
        """Ring from this operator on in forward; `NEVER`: not at all."""
        alarms = self._forward[thread % CLOCKS]
        _set(alarms, (id(timing), thread), operator)
        self._shim.clock_forward(thread, min(alarms.values(), default=NEVER))

    def set_backward(self, timing: Timing, thread: int, operator: int) -> None:
        """Ring from this operator down in backward; `NEVER`: not at all."""
        alarms = self._backward[thread % CLOCKS]
        _set(alarms, (id(timing), thread), operator)
        self._shim.clock_backward(thread, max(alarms.values(), default=NEVER))

    @untraced
    def _ring(self, thread: int, operator: int, phase: int) -> None:
        # On the thread whose operator it is, no lock held. Below C++ frames: nothing may be raised
        # through them.
        call_back(self, partial(self._wake, thread, operator, phase), None)

    def _wake(self, thread: int, operator: int, phase: int) -> None:
        is_heard = False
        with self._lock:
            for reference in tuple(self._timings.values()):
                timing = reference()
                if timing is not None and timing.ring(thread, operator, phase):
                    is_heard = True
            if not is_heard:  # an alarm of a timing that is gone
                clock = thread % CLOCKS
                self._shim.clock_forward(thread, min(self._forward[clock].values(), default=NEVER))
                self._shim.clock_backward(
                    thread, max(self._backward[clock].values(), default=NEVER)
                )

    def _forget(self, number: int, _reference: object) -> None:
        """Drop the alarms of a timing that is gone."""
        self._timings.pop(number, None)
        for alarms in (*self._forward, *self._backward):
            for key in tuple(alarms):
                if key[0] == number:
                    alarms.pop(key, None)


def _set(alarms: dict[tuple[int, int], int], key: tuple[int, int], operator: int) -> None:
    if operator == NEVER:
        alarms.pop(key, None)
    else:
        alarms[key] = operator
