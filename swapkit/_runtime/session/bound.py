"""Sessions that end with the call that they belong to.

A library's training loop may end with an exception and tell nobody. A session that a callback
opened inside such a loop is bound to the call that runs the loop. It is closed when that call is no
longer on the stack: by the next question about sessions on any thread, or by a thread that looks
every `PERIOD_SECONDS`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.torch_compat.thread_stacks import stacks
from swapkit.texts import get_logger
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from types import FrameType

PERIOD_SECONDS = 0.2
_log = get_logger(__name__)


class Closable(Protocol):
    """A session."""

    limit_bytes: int

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""

    def close(self) -> None:
        """End it, on any thread."""


class _BoundSession:
    """A session, and the call that it must not outlive."""

    def __init__(self, session: Closable, frame: FrameType) -> None:
        self.session = weakref.ref(session)
        self._thread = threading.get_ident()
        # Not the frame itself: it would keep the loop's tensors alive. The interpreter keeps a
        # frame object for as long as its call runs.
        self._frame = id(frame)
        self._code = frame.f_code

    def is_running(self) -> bool:
        """Return whether the call runs. Any thread; no lock."""
        if threading.get_ident() != self._thread:
            # A second run of the same function, on yet another thread, hides that this one ended.
            return any(code is self._code for stack in stacks() for code, _ in stack)
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - 0 would hold itself
        while frame is not None and (id(frame) != self._frame or frame.f_code is not self._code):
            frame = frame.f_back
        return frame is not None


_bound: list[_BoundSession] = []
_watchers: list[threading.Thread] = []  # at most one
_lock = make_fork_lock()


def bind(session: Closable, frame: FrameType) -> None:
    """End a session when a call has ended, if it is still active then.

    Args:
        session: an active session of this thread.
        frame: of the call, which runs on this thread.
    """
    with _lock:
        _bound[:] = [each for each in _bound if _is_active(each)]
        _bound.append(_BoundSession(session, frame))
        if not _watchers or not _watchers[0].is_alive():  # after a fork, too
            _watchers[:] = [threading.Thread(target=_watch, name="swapkit-loops", daemon=True)]
            _watchers[0].start()


def close_left() -> None:
    """Close the sessions whose calls have ended. Any thread that holds no lock."""
    for each in tuple(_bound):  # another thread may change the list
        session = each.session()
        if session is not None and session.is_active and not each.is_running():
            _close(session)


def _close(session: Closable) -> None:
    """Close a session; errors are logged, because the code that runs now is not its own."""
    _log.warning(
        "a training loop has ended without its end, most likely by an exception: its budget of %s "
        "is lifted",
        format_bytes(session.limit_bytes),
    )
    try:
        session.close()
    except Exception:  # noqa: BLE001 - of any kind
        _log.exception("cleanup failed after a session ended")


def _watch() -> None:
    """Close sessions on a thread of its own, until none is left."""
    pause = threading.Event()
    while True:
        pause.wait(PERIOD_SECONDS)
        with contextlib.suppress(RuntimeError):  # stacks cannot be read now
            close_left()
        with _lock:
            _bound[:] = [each for each in _bound if _is_active(each)]
            if not _bound:
                _watchers.clear()
                return


def _is_active(bound: _BoundSession) -> bool:
    session = bound.session()
    return session is not None and session.is_active
