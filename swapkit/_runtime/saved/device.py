"""A device: its backend, and the pool that serves torch there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from swapkit._native.sched import Scheduler
from swapkit._runtime.model.node_ranks import share_of_node
from swapkit._runtime.saved.limits import Limits
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._native.backend import Backend
    from swapkit._native.pool import BlockInfo, RingKind
    from swapkit._runtime.saved.shared import SharedState

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
