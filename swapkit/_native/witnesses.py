"""Who is told that a pool's threads make memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._native.lib import AllocationWitness


class _Told(threading.local):
    """Who was told that this thread makes memory, until it has ended that."""

    witnesses: tuple[AllocationWitness, ...] = ()


class Witnesses:
    """The witnesses of one pool. Any thread may change them, also while others allocate.

    They change under a lock, together with what the core calls; threads that allocate read them
    without, as a whole. The thread that has the lock may take it again, in a signal handler; it is
    not held while anybody is told.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.RLock()
        self._witnesses: tuple[AllocationWitness, ...] = ()
        self._told = _Told()

    def add(self, witness: AllocationWitness, apply: Callable[[bool], None]) -> None:
        """Tell one more of what begins from now on; `apply` gets whether there are any."""
        with self._lock:
            self._witnesses = (*self._witnesses, witness)
            apply(True)  # noqa: FBT003 - C's

    def remove(self, witness: AllocationWitness | None, apply: Callable[[bool], None]) -> None:
        """Tell one, None: all, no longer of what begins; what has begun has its end told."""
        with self._lock:
            left = self._witnesses if witness is not None else ()
            self._witnesses = tuple(each for each in left if each is not witness)
            apply(bool(self._witnesses))

    def tell(self, *, begins: bool) -> None:
        """Forward what this thread does to who wanted to know when it began."""
        if begins:
            self._told.witnesses = self._witnesses
        for each in self._told.witnesses:
            (each.stop if begins else each.go_on)()
        if not begins:
            self._told.witnesses = ()
