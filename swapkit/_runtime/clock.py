"""The clock of operators, shared by all swappers: who wants to be woken where."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from swapkit._native.lib import call_back
from swapkit._runtime.guards import untraced

if TYPE_CHECKING:
    import threading
    from typing import TypeAlias

    from swapkit._runtime.shim import Shim
    from swapkit._runtime.timing import Timing

    _Alarms: TypeAlias = weakref.WeakKeyDictionary[Timing, dict[int, int]]

NEVER = -1
CLOCKS = 64  # `cpp/operators.cpp` has so many: more threads than that share them


class Clock:
    """Alarms at operators. It runs from its first use on."""

    def __init__(self, shim: Shim, lock: threading.RLock) -> None:
        self._shim = shim
        self._lock = lock
        self._timings: weakref.WeakSet[Timing] = weakref.WeakSet()
        # By timing, which takes its alarms with it, and thread.
        self._forward: _Alarms = weakref.WeakKeyDictionary()
        self._backward: _Alarms = weakref.WeakKeyDictionary()
        self._callback: object = None

    def attend(self, timing: Timing) -> int:
        """Let a timing be rung; return the number of the running thread."""
        self._timings.add(timing)
        if self._callback is None:
            self._callback = self._shim.start_clock(self._ring)
        return self._shim.clock_thread()

    def set_forward(self, timing: Timing, thread: int, operator: int) -> None:
        """Ring from this operator on in forward; `NEVER`: not at all."""
        _set(self._forward, timing, thread, operator)
        self._shim.clock_forward(thread, min(_due(self._forward, thread), default=NEVER))

    def set_backward(self, timing: Timing, thread: int, operator: int) -> None:
        """Ring from this operator down in backward; `NEVER`: not at all."""
        _set(self._backward, timing, thread, operator)
        self._shim.clock_backward(thread, max(_due(self._backward, thread), default=NEVER))

    @untraced
    def _ring(self, thread: int, operator: int, phase: int) -> None:
        # Below C++ frames: nothing may be raised through them.
        call_back(self, lambda: self._wake(thread, operator, phase), None)

    def _wake(self, thread: int, operator: int, phase: int) -> None:
        with self._lock:
            rung = [timing.ring(thread, operator, phase) for timing in list(self._timings)]
            if not any(rung):  # for a timing that is gone
                self._shim.clock_forward(thread, min(_due(self._forward, thread), default=NEVER))
                self._shim.clock_backward(thread, max(_due(self._backward, thread), default=NEVER))


def _set(alarms: _Alarms, timing: Timing, thread: int, operator: int) -> None:
    own = alarms.setdefault(timing, {})
    if operator == NEVER:
        own.pop(thread, None)
    else:
        own[thread] = operator


def _due(alarms: _Alarms, thread: int) -> list[int]:
    """Return the alarms that are set on a thread's clock."""
    clock = thread % CLOCKS
    return [due for own in alarms.values() for at, due in own.items() if at % CLOCKS == clock]
