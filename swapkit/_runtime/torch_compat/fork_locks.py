"""Locks that a forked child finds free, whichever thread held them."""

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

    Where a thread holds several at once, make the outer one last: a fork takes the latest first.
    """
    lock = threading.RLock()
    hold_over_forks(lock)
    return lock


def hold_over_forks(lock: _Lock) -> None:
    """Let a fork wait for a lock, and parent and child release it."""
    release = lock.release
    os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)
