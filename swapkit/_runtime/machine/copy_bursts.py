"""Rows of copies: what speeds are measured with.

A *row* is a few copies of one direction, queued at once, as a session's are. All memory is taken
tentatively: nobody is rescued for a measurement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit._native.pool import tentative
from swapkit._native.sched import CLEAN, Group
from swapkit._runtime.optimizer.host_copies import NOT_STARTED
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.torch_compat.internals import storage_address
from swapkit.errors import OverBudget
from swapkit.ir.plans import Tier
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit._native.sched import Scheduler
    from swapkit._runtime.optimizer.host_copies import Start
    from swapkit._runtime.saved.device import Device

COPIES = 3  # of a row
LEAST_BYTES = 256 << 10
PAGE_BYTES = 4 << 10  # copies are whole pages
# Bytes that no file system makes smaller, without a random number of the user's being used up.
_ODD = -7046029254386353131


class Burst:
    """Copies of one direction. Made, prepared, queued, waited for, and prepared again."""

    def __init__(self, lanes: Lanes, nbytes: int) -> None:
        self._lanes = lanes
        self._groups: list[Group] = []
        self._nbytes = nbytes

    def prepare(self) -> None:
        """Make all copies ready to be queued."""
        raise NotImplementedError

    def queue(self, index: int, producer: int = 0) -> None:
        """Queue one of `COPIES`, in their order, behind what a stream has been given."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Return whether all copies are done."""
        # Copies of one direction end in their order.
        return all(self._poll(group) for group in reversed(self._groups))

    def finish(self, consumer: int = 0) -> None:
        """Let a stream wait for all copies; on the CPU, the host."""
        for group in self._groups:
            self._finish(group, consumer)

    def settle(self) -> None:
        """Wait until no copy holds anything."""
        self._lanes.scheduler.drain()

    def _poll(self, group: Group) -> bool:
        raise NotImplementedError

    def _finish(self, group: Group, consumer: int) -> None:
        raise NotImplementedError


class RowOut(Burst):
    """Copies to the host."""

    def prepare(self) -> None:
        """Give the host memory of the last run back, and make groups anew."""
        self._groups = []
        self._groups = self._lanes.make_groups(self._nbytes)

    def queue(self, index: int, producer: int = 0) -> None:
        """Queue one: on the way out the latest next use goes first."""
        self._lanes.start_out(self._groups[index], COPIES - index, producer)

    def _poll(self, group: Group) -> bool:
        return group.state == CLEAN or group.poll_out()

    def _finish(self, group: Group, consumer: int) -> None:
        group.finish_out(consumer)


class RowIn(Burst):
    """Copies back, of the same host memory again and again."""

    def prepare(self) -> None:
        """Give up the device memory; the first time there are copies to be made."""
        if not self._groups:
            out = RowOut(self._lanes, self._nbytes)
            out.prepare()
            for index in range(COPIES):
                out.queue(index)
            out.finish()
            out.settle()
            self._groups = out._groups  # noqa: SLF001 - of the same family
        for group in self._groups:
            group.evict()

    def queue(self, index: int, producer: int = 0) -> None:
        """Queue one."""
        self._lanes.start_in(self._groups[index], index, producer)

    def _poll(self, group: Group) -> bool:
        return group.state == CLEAN or group.poll_in()

    def _finish(self, group: Group, consumer: int) -> None:
        group.finish_in(consumer)


class Lanes:
    """A scheduler of our own over the device's link, and device memory to copy from and to."""

    def __init__(self, device: Device, scheduler: Scheduler, nbytes: int) -> None:
        """Take device memory: twice `nbytes`, or what there is.

        Raises:
            OverBudget: not even a little could be had without a rescue.
        """
        self.device = device
        self.scheduler = scheduler
        self.nbytes, self.source, self.target = _take_memory(device, nbytes)

    def make_groups(self, nbytes: int, tier: Tier = Tier.HOST) -> list[Group]:
        """Return the groups of a row: storages that are on the device."""
        return [Group(self.scheduler, nbytes, tier) for _ in range(COPIES)]

    def start_out(self, group: Group, next_use: int, producer: int = 0) -> None:
        """Queue a copy to the host, behind what a stream has been given."""
        self._start(group, group.copy_out, self.source, next_use, producer)

    def start_in(self, group: Group, next_use: int, producer: int = 0) -> None:
        """Queue a copy back, likewise."""
        self._start(group, group.copy_in, self.target, next_use, producer)

    def _start(
        self,
        group: Group,
        copy: Start,
        memory: torch.UntypedStorage,
        next_use: int,
        producer: int,
    ) -> None:
        """Queue a copy, which holds the device memory until it is done."""
        shim = self.device.shared.shim
        owner = 0
        try:
            owner = shim.new_owner(storage_address(memory))
            copy(memory.data_ptr(), owner=owner, next_use=next_use, producer=producer)
        except BaseException:
            if owner and group.state in NOT_STARTED:  # else interrupted with the copy under way
                shim.drop_owner(owner)
            raise


def _take_memory(
    device: Device, nbytes: int
) -> tuple[int, torch.UntypedStorage, torch.UntypedStorage]:
    """Return memory to copy from and to, each of at most `nbytes`, and how much that is."""
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
                torch.cuda.current_stream(device.name).synchronize()
            return nbytes, source.untyped_storage(), target.untyped_storage()
    raise OverBudget(
        f"the speed of copies cannot be measured: of {format_bytes(device.budget_bytes)} there "
        f"are not {format_bytes(2 * max(wanted_bytes, LEAST_BYTES))} free"
    )
