"""Locks that are free in a forked child, whichever thread held them before."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class _Lock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> object: ...


def make_fork_lock() -> AbstractContextManager[Any]:
    """Return a reentrant lock that a fork waits for.

    If a thread holds several at once, make the outer one last: a fork takes the newest lock first.
    """
    lock = threading.RLock()
    hold_over_forks(lock)
    return lock


def hold_over_forks(lock: _Lock) -> None:
    """Acquire a lock before each fork, and release it in parent and child."""
    release = lock.release
    os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)
