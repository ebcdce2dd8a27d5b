"""Carrying out moves: groups to the host and back, over the native scheduler.

The scheduler owns queues, streams, host memory and the disk; here is what needs torch: the storages
at the device's end, and who waits how long for what.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import torch

from swapkit._native.pool import RingKind, set_tentative
from swapkit._native.sched import COPYING_OUT, OUT, RESIDENT, Scheduler, Tier
from swapkit._runtime.shim import CPU
from swapkit.errors import DiskError, OutOfDisk, OutOfHostMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swapkit._native.backend import Backend
    from swapkit._native.pool import Pool
    from swapkit._native.sched import Group, SchedulerStats
    from swapkit._runtime.groups import StorageGroup
    from swapkit._runtime.shim import Shim

# Why a copy out is not made or fails without harm: the storage stays where it is.
NO_ROOM = (OutOfHostMemory, OutOfDisk, DiskError)

# A group's states before a transfer out, and before one in.
NOT_STARTED = (RESIDENT, OUT)

# The Python object of a storage that is alive; torch means it for weak references.
_wrap: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001

LAST = 2**63  # next uses count down from here: what was saved last is needed first


class Start(Protocol):
    """`Group.copy_out` or `Group.copy_in`."""

    def __call__(self, device: int, *, owner: int, next_use: int) -> None:
        """Queue the copy."""


class Executor:
    """A scheduler, and the storages it copies from and to. The caller's lock guards the groups."""

    def __init__(
        self,
        backend: Backend,
        shim: Shim,
        *,
        host_limit_bytes: int = 0,
        disk: Path | None = None,
        disk_limit_bytes: int = 0,
    ) -> None:
        """Open the scheduler; see `Scheduler` for the arguments."""
        self.shim = shim
        self.has_disk = disk is not None
        self.scheduler = Scheduler(
            backend,
            drop_owner=shim.drop_address,
            host_limit_bytes=host_limit_bytes,
            disk=disk,
            disk_limit_bytes=disk_limit_bytes,
        )
        self.pool: Pool | None = None  # whose ring copies are noted in, if it has one
        # By site: what its users waited for it.
        self.stall_seconds: defaultdict[tuple[int, int], float] = defaultdict(float)

    def stats(self) -> SchedulerStats:
        """Return what the scheduler has done and holds."""
        return self.scheduler.stats()

    def copy_out(self, group: StorageGroup) -> bool:
        """Start copying a resident group out; return False if there is no room for the copy."""
        storage = group.storage
        if storage is None:
            return False
        tier = group.choice.tier if self.has_disk else Tier.ANY
        native, device = group.begin(self.scheduler, tier)
        try:
            self.lend(native, native.copy_out, storage, device, next_use=LAST - group.serial)
        except NO_ROOM:
            return False
        self._note(RingKind.COPY_OUT, native.nbytes)
        return True

    def lend(
        self,
        native: Group,
        start: Start,
        storage: torch.UntypedStorage,
        device: int,
        *,
        next_use: int,
    ) -> None:
        """Start a transfer of a native group, which holds the storage until it is done."""
        owner = storage._cdata  # noqa: SLF001
        try:
            self.shim.hold(owner)
            start(device, owner=owner, next_use=next_use)
        except BaseException:
            if native.state_at[0] in NOT_STARTED:  # else interrupted with the copy under way
                self.shim.drop(owner)
            raise

    def _note(self, kind: RingKind, nbytes: int) -> None:
        if self.pool is not None and self.pool.has_ring:
            self.pool.note(kind, nbytes)

    def finish_out(self, group: StorageGroup) -> bool:
        """Wait for a copy out; return False if it failed for want of room."""
        native = group.native
        if native is None:
            return False
        started = time.perf_counter()
        try:
            native.finish_out()
        except NO_ROOM:
            return False
        finally:
            self.stall_seconds[group.tag, group.index] += time.perf_counter() - started
        return True

    def poll_out(self, group: StorageGroup) -> bool:
        """Return whether no copy out is under way any more, without waiting for it."""
        native = group.native
        if native is None or native.state != COPYING_OUT:
            return True
        try:
            return native.poll_out()
        except NO_ROOM:
            return True

    def evict(self, group: StorageGroup) -> None:
        """Give up the memory of a clean group."""
        if group.native is not None:
            group.native.evict()  # before it is true: interrupted here, the group can still be used
            group.strip(self.shim)

    def copy_in(self, group: StorageGroup, *, tentative: bool = False) -> bool:
        """Start bringing a group that is out back.

        Returns False if `tentative` and there is no memory to be had without effort.

        Raises:
            torch.OutOfMemoryError: there is no room on the device.
        """
        native = group.native
        if native is None:
            return False
        owner = self._new_storage(native.nbytes, tentative=tentative)
        if not owner:
            return False
        try:
            storage = _wrap(owner)
            group.restore(storage)
            native.copy_in(storage.data_ptr(), owner=owner, next_use=LAST - group.serial)
        except BaseException:
            if native.state_at[0] == OUT:  # else interrupted with the copy under way
                group.storage = None
                self.shim.drop(owner)
            raise
        self._note(RingKind.COPY_IN, native.nbytes)
        return True

    def _new_storage(self, nbytes: int, *, tentative: bool) -> int:
        """Return a new storage, which we hold; 0 if only effort could get the memory."""
        if not tentative:
            return self.shim.new_storage(nbytes, CPU)
        previous = set_tentative(on=True)
        try:
            return self.shim.new_storage(nbytes, CPU)
        except torch.OutOfMemoryError:
            return 0
        finally:
            set_tentative(on=previous)

    def finish_in(self, group: StorageGroup) -> None:
        """Wait for a copy back.

        Raises:
            DiskError: the copy could not be read.
        """
        native = group.native
        if native is None or native.poll_in():
            return
        started = time.perf_counter()
        try:
            native.finish_in()
        except BaseException:
            if native.state == OUT:
                group.storage = None
            raise
        finally:
            self.stall_seconds[group.tag, group.index] += time.perf_counter() - started
