"""Bursts of copies, used to measure copy speeds.

A *burst* is a few copies in one direction, queued at once, like those of a session. All device
memory is allocated tentatively: a measurement never starts a rescue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit._native.pool import tentative
from swapkit._native.sched import CLEAN, Group
from swapkit._runtime.optimizer.host_copies import start_copy
from swapkit._runtime.saved.device import CPU
from swapkit.errors import OverBudget
from swapkit.ir.plans import Tier
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit._native.sched import Scheduler
    from swapkit._runtime.saved.device import Device

COPIES = 3  # per burst
LEAST_BYTES = 256 << 10
PAGE_BYTES = 4 << 10  # copies are whole pages
# Makes bytes that no file system can compress, without drawing from the user's generators.
_ODD = -7046029254386353131


class Burst:
    """Copies in one direction. Life cycle: prepare, queue, finish, prepare again."""

    def __init__(self, lanes: Lanes, nbytes: int) -> None:
        self._lanes = lanes
        self._groups: list[Group] = []
        self._nbytes = nbytes

    def prepare(self) -> None:
        """Make all copies ready to be queued."""
        raise NotImplementedError

    def queue(self, index: int, producer: int = 0) -> None:
        """Queue one of `COPIES`, in order, behind the work on the `producer` stream."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Return whether all copies are done."""
        # Copies in one direction end in order.
        return all(self._poll(group) for group in reversed(self._groups))

    def finish(self, consumer: int = 0) -> None:
        """Make the `consumer` stream (on the CPU, the host) wait for all copies."""
        for group in self._groups:
            self._finish(group, consumer)

    def settle(self) -> None:
        """Wait until no copy holds any memory."""
        self._lanes.scheduler.drain()

    def _poll(self, group: Group) -> bool:
        raise NotImplementedError

    def _finish(self, group: Group, consumer: int) -> None:
        raise NotImplementedError


class BurstOut(Burst):
    """Copies to the host."""

    def prepare(self) -> None:
        """Return the host memory of the last run, and create new groups."""
        self._groups = []
        self._groups = self._lanes.make_groups(self._nbytes)

    def queue(self, index: int, producer: int = 0) -> None:
        """Queue one copy; the group with the latest next use is copied out first."""
        self._lanes.start_out(self._groups[index], COPIES - index, producer)

    def _poll(self, group: Group) -> bool:
        return group.state == CLEAN or group.poll_out()

    def _finish(self, group: Group, consumer: int) -> None:
        group.finish_out(consumer)


class BurstIn(Burst):
    """Copies back to the device, from the same host memory each time."""

    def prepare(self) -> None:
        """Release the device memory; the first time, copy out first."""
        if not self._groups:
            out = BurstOut(self._lanes, self._nbytes)
            out.prepare()
            for index in range(COPIES):
                out.queue(index)
            out.finish()
            out.settle()
            self._groups = out._groups  # noqa: SLF001 - same class hierarchy
        for group in self._groups:
            group.evict()

    def queue(self, index: int, producer: int = 0) -> None:
        """Queue one copy."""
        self._lanes.start_in(self._groups[index], index, producer)

    def _poll(self, group: Group) -> bool:
        return group.state == CLEAN or group.poll_in()

    def _finish(self, group: Group, consumer: int) -> None:
        group.finish_in(consumer)


class Lanes:
    """A separate scheduler over the device's link, and device memory for copies."""

    def __init__(self, device: Device, scheduler: Scheduler, nbytes: int) -> None:
        """Allocate device memory: twice `nbytes`, or less if less is free.

        Raises:
            OverBudget: not even `LEAST_BYTES` are free without a rescue.
        """
        self.device = device
        self.scheduler = scheduler
        self.nbytes, self.source, self.target = _take_memory(device, nbytes)

    def make_groups(self, nbytes: int, tier: Tier = Tier.HOST) -> list[Group]:
        """Return the groups of a burst, resident on the device."""
        return [Group(self.scheduler, nbytes, tier) for _ in range(COPIES)]

    def start_out(self, group: Group, next_use: int, producer: int = 0) -> None:
        """Queue a copy to the host, behind the work on the `producer` stream."""
        shim = self.device.shared.shim
        start_copy(shim, group, group.copy_out, self.source, next_use=next_use, producer=producer)

    def start_in(self, group: Group, next_use: int, producer: int = 0) -> None:
        """Queue a copy back, behind the work on the `producer` stream."""
        shim = self.device.shared.shim
        start_copy(shim, group, group.copy_in, self.target, next_use=next_use, producer=producer)


def _take_memory(
    device: Device, nbytes: int
) -> tuple[int, torch.UntypedStorage, torch.UntypedStorage]:
    """Return a size of at most `nbytes`, and memory of that size to copy from and to."""
    wanted_bytes = nbytes
    while nbytes >= LEAST_BYTES:
        try:
            with tentative():
                source = torch.arange(nbytes // 8, dtype=torch.int64, device=device.name)
                target = torch.zeros(nbytes, dtype=torch.uint8, device=device.name)
        except torch.OutOfMemoryError:
            nbytes = nbytes // 2 // PAGE_BYTES * PAGE_BYTES
        else:
            source.mul_(_ODD)
            if device.name != CPU:
                torch.accelerator.current_stream(device.name).synchronize()
            return nbytes, source.untyped_storage(), target.untyped_storage()
    raise OverBudget(
        "cannot measure the speed of copies: fewer than "
        f"{format_bytes(2 * max(wanted_bytes, LEAST_BYTES))} of "
        f"{format_bytes(device.budget_bytes)} are free"
    )
