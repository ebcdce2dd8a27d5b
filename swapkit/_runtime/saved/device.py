"""A device: its backend and pool, the limits and counters of sessions on it."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from swapkit._native.backend import Backend
from swapkit._native.pool import BlockInfo, BlockState, RingKind
from swapkit._native.sched import RESIDENT, Scheduler
from swapkit._runtime.model.ranks import share_of_node
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.shim.library import load_shim
from swapkit._runtime.shim.types import Mover, StorageGroup
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS
from swapkit._runtime.torch_compat.isolation import hold_over_forks
from swapkit.units import round_up

# ---- counters ------------------------------------------------------------------------------------
#
# The counters of a session, in one place: statistics, step reports and `explain()` read them.


class Counters(NamedTuple):
    """What a session has freed, recomputed and transferred since it began.

    Args:
        rescues: rescues that freed memory.
        recomputed: recomputations of a part or of a single operator.
        copied_out_bytes: bytes copied from the device.
        copied_in_bytes: bytes copied back.
        stall_seconds: the time that threads waited for transfers.
    """

    rescues: int
    recomputed: int
    copied_out_bytes: int
    copied_in_bytes: int
    stall_seconds: float

    def __sub__(self, earlier: Counters) -> Counters:
        """Return what was counted since `earlier`."""
        return Counters._make(map(operator.sub, self, earlier))


# ---- limits --------------------------------------------------------------------------------------
#
# The limits of a session, or of one planned step.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory and the disk space that training may use.

    Args:
        budget_bytes: the most bytes reserved on the device; 0: no limit.
        host_bytes: the most bytes of copies on the host; None: all of the host's memory.
        disk: the folder for copies that the host has no room for; None: no disk.
        disk_bytes: the most bytes of copies on the disk; 0: all of the file system.
    """

    budget_bytes: int = 0
    host_bytes: int | None = None
    disk: Path | None = None
    disk_bytes: int = 0


# ---- byte curve ----------------------------------------------------------------------------------
#
# Swapping by the plan's byte counts after a step has deviated from its plan.


class Curve:
    """The bytes that a plan has sent out by each save, for a step that deviated from the plan.

    A newly saved group is sent out if the plan would have sent out more bytes by the end of the
    saves of the group's module.
    """

    def __init__(self, mover: Mover, curve: Sequence[tuple[int, int]], moved_bytes: int) -> None:
        """Begin in the middle of a step.

        Args:
            mover: sends groups out.
            curve: for each save in the plan: the module's tag, and the bytes sent out by then.
            moved_bytes: sent out in this step so far.
        """
        self._mover = mover
        self._curve = curve
        self._moved_bytes = moved_bytes
        self._at = 0  # the step's position on the curve
        self._places: dict[int, list[int]] = {}
        for at, (tag, _) in enumerate(curve):
            self._places.setdefault(tag, []).append(at)

    def saved(self, group: StorageGroup) -> None:
        """Send a newly saved group out if the step is behind the plan's bytes. Lock held."""
        places = self._places.get(group.tag, [])
        following = bisect_left(places, self._at)
        if following < len(places):
            self._at = places[following]
        if self._moved_bytes + group.nbytes > self._goal() or self._mover.host_is_full:
            return
        if group.state == RESIDENT:
            self._mover.send(group)
            self._moved_bytes += group.nbytes

    def _goal(self) -> int:
        """Return the bytes that the plan sends out by the end of the current module's saves."""
        if not self._curve:
            return 0
        at, tag = self._at, self._curve[self._at][0]
        while at + 1 < len(self._curve) and self._curve[at + 1][0] == tag:
            at += 1
        return self._curve[at][1]


# ---- shared --------------------------------------------------------------------------------------
#
# The state that all devices and swappers of a process share.


class PlannedMove(NamedTuple):
    """One planned move that was carried out, for traces."""

    kind: str  # "release" or "prefetch"
    site: str
    saved_by: int  # the last operator that saved it
    operator: int  # at which it was carried out
    nbytes: int


class SharedState:
    """The shim, the module names and the lock. The only subclass is `process.runtime.Runtime`."""

    def __init__(self) -> None:
        self.shim = load_shim()
        self.tracker = ModuleTracker(self.shim.set_coarse_site)
        # Guards all sessions and the groups that they move. One lock for all: an allocation in one
        # session may ask any other session for bytes.
        self.lock = self.shim.lock()
        # A fork waits for the lock, so the child process always starts with the lock free.
        hold_over_forks(self.lock)
        self.trace: list[PlannedMove] | None = None  # of planned moves; None: not recorded

    def other_mover(self, device_type: int, index: int) -> Mover | None:
        """Return the mover of a device; None: there is none."""
        raise NotImplementedError

    def host_bytes(self) -> int:
        """Return the bytes of memory of the machine, or of its control group."""
        raise NotImplementedError

    def host_node(self, name: torch.device) -> int:
        """Return the NUMA node whose memory suits a device's host copies; `ANY_NODE`: unknown.

        Any thread. The first call for a device may run commands: hold no lock then.
        """
        raise NotImplementedError


# ---- device --------------------------------------------------------------------------------------
#
# A device: its backend, and the pool that serves torch there.

CPU = torch.device("cpu")
NO_LIMITS = Limits()
LOCKED_SHARE = 0.75  # of the memory of the machine, or of its control group
# Torch's numbers for the device types that swapkit serves.
TYPES = {"cpu": 0, **{each.type: each.number for each in ACCELERATORS.values()}}
NO_INDEX = -1  # torch's index of the CPU


class DevicePool(Protocol):
    """The allocator of a device: our pool, or torch's own allocator, observed by swapkit."""

    @property
    def address(self) -> int:
        """The address of the native pool; 0: there is none."""

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more would leave room in the budget for operators."""

    def in_use_bytes(self) -> int:
        """Return the allocated bytes."""

    def moving_seconds(self) -> float:
        """Return the seconds spent on moves of free memory."""

    def peak_take(self) -> int:
        """Return the most bytes reserved since the last call."""

    def stats(self) -> dict[str, int]:
        """Return the statistics under torch's flat names, plus `budget_bytes`."""

    def reset_peak(self) -> None:
        """Reset every peak to its current value."""

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; 0: none.

        Raises:
            OverBudget: more bytes are in use; the budget is unchanged.
        """

    def set_rescue(self, rescue: Callable[[int], int] | None) -> None:
        """Set the function that frees bytes when an allocation would fail."""

    def trim(self) -> None:
        """Return all cached memory to the device."""

    def owns(self, address: int) -> bool:
        """Return whether an address is in one of the pool's blocks."""

    def blocks(self) -> Sequence[BlockInfo]:
        """Describe every block."""

    def note(self, kind: RingKind, nbytes: int = 0) -> None:
        """Add an event to the ring, if one is attached."""


class Device:
    """One device of this process."""

    def __init__(self, shared: SharedState, name: torch.device, backend: Backend) -> None:
        """Begin without a pool."""
        self.shared = shared
        self.name = name
        self.type = TYPES[name.type]
        self.index = NO_INDEX if name.type == "cpu" else name.index
        self.backend = backend
        self.budget_bytes = 0  # of the pool; 0: none
        # Whether copied storages go to a list from which an allocator takes them without Python.
        self.makes_reclaimable = False
        self.largest_bytes = 0  # the size of the largest saved storage
        self.link = backend  # new schedulers copy on this backend's streams
        self.pool: DevicePool | None = None  # None: not installed yet

    def new_scheduler(self, limits: Limits = NO_LIMITS, *, copies_in_flight: int = 0) -> Scheduler:
        """Return a new scheduler with these limits.

        A GPU's host copies are page-locked: without a limit they get a share of the host's memory,
        of which each rank of the machine has an equal part.
        They lie on the device's NUMA node, where it is known. Any thread; the first call for a
        device may run commands: hold no lock then.
        """
        host_bytes = limits.host_bytes
        if host_bytes is None and self.name != CPU:
            host_bytes = share_of_node(int(self.shared.host_bytes() * LOCKED_SHARE))
        self.link.host_node = self.shared.host_node(self.name)
        return Scheduler(
            self.link,
            drop_owner=self.shared.shim.drop_address,
            host_limit_bytes=host_bytes,
            disk=limits.disk,
            disk_limit_bytes=limits.disk_bytes,
            copies_in_flight=copies_in_flight,
        )

    def current_stream(self) -> int:
        """Return the address of this thread's stream; 0: the default stream, or a CPU."""
        return self.shared.shim.current_stream(self.type, self.index)

    def in_use_bytes(self) -> int:
        """Return the pool's bytes in use; 0 without a pool."""
        return 0 if self.pool is None else self.pool.in_use_bytes()

    def lost_bytes(self) -> int:
        """Return the free bytes in granules that blocks in use lie in, too; 0: not our pool."""
        if self.pool is None or not self.pool.address:
            return 0
        granule = self.backend.granule_bytes
        free = [each for each in self.pool.blocks() if each.state is BlockState.CACHED]
        ranges = [(each.address, each.address + each.nbytes) for each in free]
        # A block's whole granules can be given back.
        return sum(
            end - start - max(0, end // granule * granule - round_up(start, granule))
            for start, end in ranges
        )

    def moving_seconds(self) -> float:
        """Return the seconds that the pool has spent on moves of free memory; 0 without a pool."""
        return 0.0 if self.pool is None else self.pool.moving_seconds()

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more would leave room in the budget for operators."""
        return self.pool is None or self.pool.has_room(nbytes)

    def expect(self, nbytes: int) -> None:
        """Note the size of a saved storage: later allocations may be as large."""
        if self.makes_reclaimable and nbytes > self.largest_bytes:
            self.largest_bytes = nbytes
            self.shared.shim.native_expect(self.index, nbytes)
