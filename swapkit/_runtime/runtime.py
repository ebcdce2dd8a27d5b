"""What swapkit's parts share in one process, whether or not its pool stands below torch."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from swapkit._native.backend import Backend
from swapkit._native.sched import Scheduler
from swapkit._runtime.clock import Clock
from swapkit._runtime.shim import load_shim
from swapkit._runtime.swapper import Swapper
from swapkit._runtime.tracking import ModuleTracker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swapkit._native.pool import Pool
    from swapkit._runtime.saved import StorageGroup

# Of the budget; bringing something back early leaves at least this share free for operators.
ROOM = 1 / 64


class Move(NamedTuple):
    """One planned move, as it happened: for traces."""

    kind: str  # "release" or "prefetch"
    site: str
    saved_by: int  # the last operator that saved it
    operator: int  # where it happened
    nbytes: int


class _Entered(threading.local):
    """The swappers of the sessions that were entered on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Swapper] = []


class Runtime:
    """The device, the names of modules, the clock of operators, and all swappers."""

    def __init__(self) -> None:
        self.shim = load_shim()
        self.backend = Backend.cpu()
        self._link = self.backend  # over which schedulers copy
        self._pool: Pool | None = None
        self.budget_bytes = 0  # of the pool; 0: none
        self.tracker = ModuleTracker()
        # Guards the sessions and what they move: one lock for all, since each may be asked for
        # bytes in the middle of another's allocation.
        self.lock = threading.RLock()
        # A fork waits for the lock and its child gets it free, whichever thread held it.
        release = self.lock.release
        os.register_at_fork(
            before=self.lock.acquire, after_in_parent=release, after_in_child=release
        )
        self.clock = Clock(self.shim, self.lock)
        # Of all sessions, ended ones too: their graphs may still hold what can be moved.
        self.swappers: weakref.WeakSet[Swapper] = weakref.WeakSet()
        self.entered = _Entered()
        self.active: list[Swapper] = []  # of the sessions that are active on any thread
        self.trace: list[Move] | None = None
        self._default: Swapper | None = None

    @property
    def pool(self) -> Pool | None:
        """The pool, once it is installed."""
        return self._pool

    def attach_pool(self, pool: Pool) -> None:
        """Note the pool; copies are noted in its ring from now on."""
        with self.lock:
            self._pool = pool
            for swapper in self.swappers:
                swapper.mover.pool_address = pool.address

    def current_swapper(self) -> Swapper:
        """Return the swapper of the session that a scope opened here belongs to.

        The innermost one of this thread; else the latest of the process, whose threads may be many;
        outside any session the process's own.
        """
        for sessions in (self.entered.stack, self.active):
            for innermost in sessions[-1:]:  # one look: other threads leave theirs meanwhile
                return innermost
        return self.default_swapper()

    def default_swapper(self) -> Swapper:
        """Return the swapper of scopes outside any session."""
        with self.lock:
            if self._default is None:
                self._default = self.new_swapper(self.new_scheduler())
            return self._default

    @contextlib.contextmanager
    def linked(self, link: Backend) -> Iterator[None]:
        """Let schedulers that are made meanwhile copy over another backend's streams."""
        usual = self._link, self._default
        self._link, self._default = link, None
        try:
            yield
        finally:
            self._link, self._default = usual

    def new_scheduler(
        self, *, host_limit_bytes: int = 0, disk: Path | None = None, disk_limit_bytes: int = 0
    ) -> Scheduler:
        """Return who moves storages, within these limits; see `Scheduler`."""
        return Scheduler(
            self._link,
            drop_owner=self.shim.drop_address,
            host_limit_bytes=host_limit_bytes,
            disk=disk,
            disk_limit_bytes=disk_limit_bytes,
        )

    def new_swapper(self, scheduler: Scheduler, *, limit_bytes: int = 0) -> Swapper:
        """Return a swapper that takes part in every rescue."""
        swapper = Swapper(self, scheduler, limit_bytes=limit_bytes)
        with self.lock:
            self.swappers.add(swapper)
        return swapper

    def in_use_bytes(self) -> int:
        """Return the pool's bytes in use; 0 without a pool."""
        return 0 if self.pool is None else self.pool.in_use_bytes()

    def has_room(self, nbytes: int) -> bool:
        """Return whether so many bytes more would leave room in the budget for operators."""
        if self.budget_bytes == 0:
            return True
        return self.in_use_bytes() + nbytes <= self.budget_bytes * (1 - ROOM)

    def note(self, kind: str, swapper: Swapper, group: StorageGroup, operator: int) -> None:
        """Remember a planned move, if somebody wants a trace."""
        if self.trace is not None:
            site = swapper.site(group)
            self.trace.append(Move(kind, site, group.operator, operator, group.nbytes))


_runtime: Runtime | None = None
_lock = threading.Lock()


def get_runtime() -> Runtime:
    """Return the process's runtime, made when it is first needed.

    Raises:
        NativeBuildError: the shim could not be compiled; see the message.
    """
    global _runtime  # noqa: PLW0603 - torch has one allocator, and one autograd, a process
    if _runtime is not None:
        return _runtime
    with _lock:
        if _runtime is None:
            _runtime = Runtime()
        return _runtime
