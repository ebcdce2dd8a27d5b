"""Searches on threads of their own, which end early when their result is no longer needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from swapkit._native.layout import StopFlag
from swapkit.planning.beside import make_way

_T = TypeVar("_T")
LANES = 2  # searches at the same time; a constant, so that results do not depend on the machine
THREAD_NAME = "swapkit-layout"
_POLL_SECONDS = 0.02


class SearchLimits:
    """Until when to search. Only the thread that made it polls."""

    def __init__(self, seconds: float, should_stop: Callable[[], bool] | None) -> None:
        """Start the clock.

        Args:
            seconds: after which searches end.
            should_stop: called now and then on this thread; True, or an error, ends them, too.
        """
        self.flag = StopFlag()
        self._begin = time.perf_counter()
        self._seconds = seconds
        self._should_stop = should_stop

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    @property
    def is_over(self) -> bool:
        """Whether searches end."""
        return self.flag.is_set

    def poll(self) -> None:
        """Set the flag if it is time to end.

        Raises:
            BaseException: of `should_stop`; the flag is set then.
        """
        try:
            is_asked = self._should_stop is not None and self._should_stop()
        except BaseException:
            self.flag.set()
            raise
        if is_asked or self.elapsed > self._seconds:
            self.flag.set()


class _Lane(Generic[_T]):
    """One piece of work on a thread. It must look at the flag of its limits."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._results: list[_T] = []
        self._error: BaseException | None = None
        # Not a daemon: the work is native, and ends soon after the flag is set.
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # too many threads, or the interpreter ends
            self._run()

    def _run(self) -> None:
        if threading.current_thread() is self._thread:
            make_way()
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised by `take`, on the other thread
            self._error = error

    def wait(self, seconds: float | None) -> bool:
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def take(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def run_lanes(works: Sequence[Callable[[], _T]], limits: SearchLimits) -> list[_T]:
    """Run pieces of work at the same time, each on a thread; return their results in order.

    Raises:
        BaseException: the first error of the work, or of `should_stop`, after all have ended.
    """
    lanes = [_Lane(work) for work in works]
    try:
        for lane in lanes:
            while not lane.wait(_POLL_SECONDS):
                limits.poll()
    finally:
        for lane in lanes:
            lane.wait(None)
    limits.poll()
    return [lane.take() for lane in lanes]
