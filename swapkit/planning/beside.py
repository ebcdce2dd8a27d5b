"""Work beside the training: on a thread of its own, which ends as soon as nobody wants its result.

Planning takes many steps' time, most of it in HiGHS and in the simulator, which let other threads
run. What works beside asks in its innermost loops whether it is to go on (`go_on`): a session that
ends waits for no more than one simulation or one linear program, and so does the interpreter.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")
THREAD_NAME = "swapkit-planning"


class GivenUp(BaseException):
    """Nobody wants what this thread works for. No error: nothing but a job catches it."""


class Elsewhere(Exception):
    """Where on the thread of a job something was raised, for people."""

    def __str__(self) -> str:
        """Return the frames, as Python prints them."""
        return f"\n\n{self.args[0]}"


class _Here(threading.local):
    job: ThreadJob[Any] | None = None


_here = _Here()


class ThreadJob(Generic[_T]):
    """One piece of work on a thread, which holds no lock.

    Any thread may give it up or wait for its end; neither calls anything of the user's.
    """

    def __init__(self, work: Callable[[], _T]) -> None:
        """Begin at once; on this thread if there is no other to be had.

        Args:
            work: must know nothing of torch: what other threads train is looked at while it runs.
        """
        self.seconds = 0.0  # that it took
        self._work: Callable[[], _T] | None = work
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self._is_given_up = False
        # No daemon: one that is stopped inside of HiGHS as the interpreter ends would crash it.
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # too many threads, or the interpreter ends
            self._run()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not. Not in a forked child, where it does not run."""
        return not self._thread.is_alive()

    @property
    def is_needless(self) -> bool:
        """Whether it ends without a result, since nobody waits for one."""
        return self._is_given_up or not threading.main_thread().is_alive()

    @property
    def result(self) -> _T | None:
        """None: there is none, or not yet."""
        return self._results[0] if self._results else None

    def take(self) -> _T | None:
        """Return the result of a job that is done; None: it was given up, or never ended.

        Raises:
            BaseException: what the work has raised; its cause says where.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.result

    def give_up(self) -> None:
        """Let it end soon. Anywhere, in finalizers too: nothing is waited for."""
        self._is_given_up = True

    def wait(self) -> None:
        """Wait until it has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        work, self._work = self._work, None
        assert work is not None
        _here.job = self
        try:
            self._results.append(work())
        except GivenUp:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by `take`
            # Its frames, and those of what led to it, would hold what it worked on.
            error.__cause__, error.__context__ = Elsewhere(traceback.format_exc()), None
            self._error = error.with_traceback(None)
        finally:
            _here.job = None
            self.seconds = time.perf_counter() - began


def go_on() -> None:
    """Raise if this thread works for a job that nobody wants any more.

    Raises:
        GivenUp: nobody does; or the program has ended, and waits for its threads.
    """
    job = _here.job
    if job is not None and job.is_needless:
        raise GivenUp


# ---- at once -------------------------------------------------------------------------------------

_at_once = [False]


def is_at_once() -> bool:
    """Return whether sessions make their plans between two steps."""
    return _at_once[-1]


@contextlib.contextmanager
def at_once(*, value: bool = True) -> Iterator[None]:
    """Let sessions wait for their plans inside, or not wait. Of the process."""
    _at_once.append(value)
    try:
        yield
    finally:
        _at_once.pop()
