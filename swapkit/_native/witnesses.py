"""The observers of a pool's threads while they make memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._native.lib import AllocationWitness


class _Told(threading.local):
    """The witnesses that got this thread's begin, until its end."""

    witnesses: tuple[AllocationWitness, ...] = ()


class Witnesses:
    """The witnesses of one pool. Any thread may change them, also while others allocate.

    They change under a lock, together with the core's callback. Threads that allocate read the
    whole tuple without the lock. The lock is reentrant, for a signal handler on the thread that
    holds it; it is not held during calls of witnesses.
    """

    def __init__(self) -> None:
        """Begin without witnesses."""
        self._lock = threading.RLock()
        self._witnesses: tuple[AllocationWitness, ...] = ()
        self._told = _Told()

    def add(self, witness: AllocationWitness, apply: Callable[[bool], None]) -> None:
        """Add a witness for all later begins; `apply` gets whether there are any witnesses."""
        with self._lock:
            self._witnesses = (*self._witnesses, witness)
            apply(True)  # noqa: FBT003 - C's

    def remove(self, witness: AllocationWitness | None, apply: Callable[[bool], None]) -> None:
        """Remove one witness, None: all, for later begins; it still gets the ends it waits for."""
        with self._lock:
            left = self._witnesses if witness is not None else ()
            self._witnesses = tuple(each for each in left if each is not witness)
            apply(bool(self._witnesses))

    def tell(self, *, begins: bool) -> None:
        """Forward a begin to the current witnesses, and an end to those of its begin."""
        if begins:
            self._told.witnesses = self._witnesses
        for each in self._told.witnesses:
            (each.stop if begins else each.go_on)()
        if not begins:
            self._told.witnesses = ()
