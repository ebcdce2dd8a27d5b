"""Background work on its own thread, which ends early when its result is no longer needed.

Planning takes as long as many steps, mostly in HiGHS and in the simulator, which release the GIL.
The work calls `go_on` in its innermost loops to check whether to continue. A session that ends,
or the interpreter at exit, thus waits for at most one simulation or one linear program.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
THREAD_NAME = "swapkit-planning"


class GivenUp(BaseException):
    """The end of a job whose result is not needed. Not an error; only the job itself catches it."""


class Elsewhere(Exception):
    """The traceback of an error on a job's thread, as the cause of that error."""

    def __str__(self) -> str:
        """Return the frames, as Python prints them."""
        return f"\n\n{self.args[0]}"


NICENESS = 5  # of Linux's scale: a third of the time of a thread that trains, if cores are few


def make_way() -> None:
    """Let the threads that train run more often than this one.

    A training step on as many threads as there are cores waits at each operator for the slowest: a
    search beside it that takes its turn makes the step many times slower.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed here
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class _Here(threading.local):
    job: ThreadJob[Any] | None = None


_here = _Here()


class ThreadJob(Generic[_T]):
    """One piece of work on a thread, which holds no lock.

    Any thread may give the job up or wait for its end; neither runs user code.
    """

    def __init__(self, work: Callable[[], _T]) -> None:
        """Start the work; if no thread can be started, run it on this thread.

        Args:
            work: must not use torch, because other threads train while it runs.
        """
        self.seconds = 0.0  # duration of the work
        self._work: Callable[[], _T] | None = work
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self._is_given_up = False
        # Not a daemon: stopping a thread inside HiGHS at interpreter exit would crash the process.
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # too many threads, or the interpreter ends
            self._run()

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, with or without a result; also true in a forked child."""
        return not self._thread.is_alive()

    @property
    def is_needless(self) -> bool:
        """Whether the result is not needed, so that the work should end early."""
        return self._is_given_up or not threading.main_thread().is_alive()

    @property
    def result(self) -> _T | None:
        """The result of the work; None: there is none, or not yet."""
        return self._results[0] if self._results else None

    def take(self) -> _T | None:
        """Return the result of a job that is done; None: it was given up, or never ended.

        Raises:
            BaseException: the error of the work; its cause has the traceback.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.result

    def give_up(self) -> None:
        """Tell the work to end soon, without waiting. Safe anywhere, also in finalizers."""
        self._is_given_up = True

    def wait(self) -> None:
        """Wait until the work has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        work, self._work = self._work, None
        assert work is not None
        if threading.current_thread() is self._thread:
            make_way()
        _here.job = self
        try:
            self._results.append(work())
        except GivenUp:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by `take`
            # Keep only the text of the traceback: frames would keep the work's data alive.
            error.__cause__, error.__context__ = Elsewhere(traceback.format_exc()), None
            self._error = error.with_traceback(None)
        finally:
            _here.job = None
            self.seconds = time.perf_counter() - began


def go_on() -> None:
    """Raise if the result of this thread's job is no longer needed.

    Raises:
        GivenUp: the job was given up, or the main thread has ended and waits for this one.
    """
    job = _here.job
    if job is not None and job.is_needless:
        raise GivenUp


# ---- at once -------------------------------------------------------------------------------------

_at_once = [False]


def is_at_once() -> bool:
    """Return whether sessions make their plans synchronously, between two steps."""
    return _at_once[-1]


@contextlib.contextmanager
def at_once(*, value: bool = True) -> Iterator[None]:
    """Make sessions of this process wait for their plans in the block, or not wait."""
    _at_once.append(value)
    try:
        yield
    finally:
        _at_once.pop()
