"""The scheduler's handle, and its groups: storages with their copies outside the device.

See `swapkit_sched.h` for the states and the rules. Addresses and owners are plain ints.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from swapkit._native.backend import ANY_NODE, Backend, Handle, Stream
from swapkit._native.lib import NULL, check, ffi, lib
from swapkit._native.rings import Ring
from swapkit.ir.plans import Tier

if TYPE_CHECKING:
    from swapkit._native._lib import CData


# Ways to finish a transfer.
POLL, WAIT = True, False


class State(enum.IntEnum):
    """Where a group's bytes are."""

    RESIDENT = lib.SK_GROUP_RESIDENT  # on the device only
    COPYING_OUT = lib.SK_GROUP_COPYING_OUT
    CLEAN = lib.SK_GROUP_CLEAN  # on the device, with a valid copy outside
    OUT = lib.SK_GROUP_OUT  # outside only
    COPYING_IN = lib.SK_GROUP_COPYING_IN


# The same as plain numbers: states are compared often, and enum members are slow to look up.
RESIDENT, COPYING_OUT, CLEAN, OUT, COPYING_IN = map(int, State)


class SchedulerStats(NamedTuple):
    """The totals and the current state of a scheduler."""

    copied_out_bytes: int
    copied_in_bytes: int
    written_bytes: int
    read_bytes: int
    stall_ns: int
    overtakes: int
    host_bytes: int
    host_reserved_bytes: int
    host_peak_bytes: int
    disk_bytes: int
    disk_peak_bytes: int
    queued: int
    in_flight: int
    groups: int


class Scheduler(Handle):
    """Copies between a device and the host, and a disk. Any thread."""

    _what = "scheduler"

    def __init__(
        self,
        backend: Backend,
        *,
        drop_owner: int,
        host_limit_bytes: int | None = None,
        disk: Path | None = None,
        disk_limit_bytes: int = 0,
        copies_in_flight: int = 0,
    ) -> None:
        """Open a scheduler. Its host copies prefer the NUMA node `backend.host_node`.

        Args:
            backend: of the device; kept open.
            drop_owner: address of a C function that gets the owners of transfers that are done.
            host_limit_bytes: most host memory for copies; None: all that the machine has.
            disk: a folder for copies that do not fit on the host; None: no disk.
            disk_limit_bytes: most disk space; 0: all that the file system has.
            copies_in_flight: of each direction; 0: as many as keep the link busy.

        Raises:
            DiskError: no file can be made in the folder.
        """
        params = ffi.new("sk_sched_params *")
        folder = NULL if disk is None else ffi.new("char[]", str(disk).encode())
        # In the core 0 means all that the machine has; one byte is room for no copy.
        params.host_limit_bytes = 0 if host_limit_bytes is None else max(1, host_limit_bytes)
        params.disk_folder = folder
        params.disk_limit_bytes = disk_limit_bytes
        params.copies_in_flight = copies_in_flight
        params.host_nodes = 0 if backend.host_node == ANY_NODE else 1 << backend.host_node
        params.drop_owner = ffi.cast("void (*)(void *)", drop_owner)
        out = ffi.new("sk_sched **")
        check(lib.sk_sched_create(backend.pointer, params, out))
        super().__init__(out[0])
        self.has_disk = disk is not None
        self.host_limit_bytes = host_limit_bytes
        self._history: Ring | None = None  # borrowed by the core

    def stats(self) -> SchedulerStats:
        """Return the totals and the current state."""
        stats = ffi.new("sk_sched_stats *")
        lib.sk_sched_stats_get(self.pointer, stats)
        return SchedulerStats._make(getattr(stats, name) for name in SchedulerStats._fields)

    def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        lib.sk_sched_drain(self.pointer)

    def trim(self) -> None:
        """Give the host memory and disk space that hold no copy back."""
        lib.sk_sched_trim(self.pointer)

    def set_history(self, ring: Ring | None) -> None:
        """Record the copies that end from now on, with their times, into `ring`; None: none."""
        lib.sk_sched_set_history(self.pointer, NULL if ring is None else ring.pointer)
        self._history = ring

    def check(self) -> None:
        """Walk every structure.

        Raises:
            CorruptState: an invariant is broken.
        """
        check(lib.sk_sched_check(self.pointer))

    def _release(self, pointer: CData) -> None:
        check(lib.sk_sched_destroy(pointer))


def _handle(stream: Stream | int | None) -> CData:
    """Return the native stream; an int is its address, as in torch, 0: the default."""
    if stream is None or isinstance(stream, int):
        return ffi.cast("sk_stream *", stream or 0)
    return stream.pointer


class Group:
    """One storage at one version, and its copy. Destroyed with the object, in any state."""

    __slots__ = ("_pointer", "nbytes", "scheduler", "state_at")

    def __init__(self, scheduler: Scheduler, nbytes: int, tier: Tier = Tier.ANY) -> None:
        """Make a group of `nbytes` that are on the device.

        Raises:
            InvalidArgument: `Tier.DISK` without a disk.
        """
        self._pointer = NULL  # first: an interrupted construction has nothing to give back
        self.scheduler = scheduler  # must outlive its groups
        self.nbytes = nbytes
        out = ffi.new("sk_group **")
        check(lib.sk_group_create(scheduler.pointer, nbytes, tier, out))
        self._pointer = out[0]
        # Read as `state_at[0]`, one of `State`, where no call may come between.
        self.state_at = lib.sk_group_state_at(self._pointer)

    def __del__(self) -> None:
        pointer = getattr(self, "_pointer", NULL)
        if pointer != NULL:
            lib.sk_group_destroy(pointer)

    @property
    def state(self) -> int:
        """One of `State`."""
        return int(self.state_at[0])

    @property
    def host_address(self) -> int:
        """Address of a copy of `Tier.HOST` while the group is clean or out, else 0."""
        return int(ffi.cast("uintptr_t", lib.sk_group_host(self._pointer)))

    def copy_out(
        self, device: int, *, owner: int, next_use: int, producer: Stream | int | None = None
    ) -> None:
        """Queue the copy of the bytes at `device`; `owner` holds them as long as it needs them.

        Raises:
            OutOfHostMemory: no room; the group stays resident, and `owner` the caller's.
            OutOfDisk: the same for the disk.
        """
        self._start(lib.sk_group_copy_out, device, owner, next_use, producer)

    def poll_out(self) -> bool:
        """Return whether the copy is done; then the group is clean.

        Raises:
            SwapkitError: the copy failed; the group is resident.
        """
        return self._poll(lib.sk_group_finish_out)

    def finish_out(self, consumer: Stream | int | None = None) -> None:
        """Let `consumer` wait for the copy; then the group is clean.

        None is the default stream: on the CPU the host waits, on other devices it does not.

        Raises:
            SwapkitError: the copy failed; the group is resident.
        """
        check(lib.sk_group_finish_out(self._pointer, _handle(consumer), WAIT))

    def evict(self) -> None:
        """Note that the owner drops the device memory of a clean group."""
        check(lib.sk_group_evict(self._pointer))

    def copy_in(
        self, device: int, *, owner: int, next_use: int, producer: Stream | int | None = None
    ) -> None:
        """Queue the copy back to `device`, which `owner` holds until the copy is done."""
        self._start(lib.sk_group_copy_in, device, owner, next_use, producer)

    def poll_in(self) -> bool:
        """Return whether the copy back is done; then the group is clean.

        Raises:
            SwapkitError: the copy failed; the group is out.
        """
        return self._poll(lib.sk_group_finish_in)

    def finish_in(self, consumer: Stream | int | None = None) -> None:
        """Let `consumer` wait for the copy; then the group is clean.

        None is the default stream: on the CPU the host waits, on other devices it does not.

        Raises:
            SwapkitError: the copy failed; the group is out.
        """
        check(lib.sk_group_finish_in(self._pointer, _handle(consumer), WAIT))

    def _poll(self, finish: Callable[..., int]) -> bool:
        status = finish(self._pointer, NULL, POLL)
        if status != lib.SK_NOT_READY:
            check(status)
        return bool(status != lib.SK_NOT_READY)

    def _start(
        self,
        copy: Callable[..., int],
        device: int,
        owner: int,
        next_use: int,
        producer: Stream | int | None,
    ) -> None:
        stream = _handle(producer)
        addresses = ffi.cast("void *", device), ffi.cast("void *", owner)
        check(copy(self._pointer, *addresses, next_use, stream))
