"""Rows of copies, and matrix products beside them: what speeds are measured with.

A *row* is a few copies of one direction, queued at once, as a session's are. All memory is taken
tentatively: nobody is rescued for a measurement.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from swapkit._native.pool import tentative
from swapkit._native.sched import Group, Tier
from swapkit._runtime.copies import NOT_STARTED
from swapkit._runtime.device import CPU
from swapkit.errors import OverBudget
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._native.backend import Stream
    from swapkit._native.sched import Scheduler
    from swapkit._runtime.copies import Start
    from swapkit._runtime.device import Device

COPIES = 3  # of a row
LEAST_BYTES = 256 << 10
PAGE_BYTES = 4 << 10  # copies are whole pages
# Products: one takes about as long as a small operator, so that the end of a row is seen in time.
CPU_WIDTH, GPU_WIDTH, LEAST_WIDTH = 256, 2048, 64
MOST_EARLIER_SECONDS = 0.0005
BATCH = 8  # products between two marks, on a GPU
MOST_MARKS = 2
# Bytes that no file system makes smaller, without a random number of the user's being used up.
_ODD = -7046029254386353131


class Load:
    """Matrix products on the compute stream."""

    def __init__(self, device: Device, *, most_bytes: int) -> None:
        """Take what memory there is for them; if there is none, nothing is computed."""
        self._is_gpu = device.name != CPU
        self._factors = _take_factors(device, most_bytes)
        self._marks: list[torch.cuda.Event] = []

    def run(self, is_over: Callable[[], bool]) -> float:
        """Compute until something is over; return the products of a second."""
        count = 0
        begin = time.perf_counter()
        while not is_over():
            if self._factors is None:
                os.sched_yield()
            elif not self._is_gpu:
                _multiply(self._factors)
                count += 1
            elif self._has_room():
                count += self._queue_batch(self._factors)
        for mark in self._marks:
            mark.synchronize()
        return count / (time.perf_counter() - begin)

    def _has_room(self) -> bool:
        self._marks = [
            mark
            for mark in self._marks
            if not mark.query()  # type: ignore[no-untyped-call]
        ]
        return len(self._marks) < MOST_MARKS

    def _queue_batch(self, factors: Sequence[torch.Tensor]) -> int:
        for _ in range(BATCH):
            _multiply(factors)
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        self._marks.append(mark)
        return BATCH


def _multiply(factors: Sequence[torch.Tensor]) -> None:
    first, second, product = factors
    torch.mm(first, second, out=product)


def _take_factors(device: Device, most_bytes: int) -> list[torch.Tensor] | None:
    """Return two factors and room for their product; None: there is no memory for them."""
    is_gpu = device.name != CPU
    dtype = torch.float16 if is_gpu else torch.float32
    width = GPU_WIDTH if is_gpu else CPU_WIDTH
    while width >= LEAST_WIDTH:
        if 3 * width * width * dtype.itemsize <= most_bytes:
            try:
                with tentative():
                    shape, value = (width, width), 1 / width
                    factors = [
                        torch.full(shape, value, dtype=dtype, device=device.name) for _ in range(3)
                    ]
                    _multiply(factors)  # a library may want memory of its own for the first one
            except torch.OutOfMemoryError:
                pass
            else:
                return factors
        width //= 2
    return None


class Row:
    """Copies of one direction. Made, started, polled until it is over, and started again."""

    def __init__(self, lanes: Lanes, nbytes: int) -> None:
        self._lanes = lanes
        self._groups: list[Group] = []
        self._nbytes = nbytes
        self._begin = self._looked = self._end = 0.0

    @property
    def seconds(self) -> float:
        """What a copy of the latest run took."""
        return (self._end - self._begin) / COPIES

    @property
    def end(self) -> float:
        """When the latest run ended."""
        return self._end

    def start(self) -> None:
        """Queue all copies."""
        self._prepare()
        self._end = 0.0
        self._begin = self._looked = time.perf_counter()
        for index, group in enumerate(self._groups):
            self._queue(group, index)

    def is_over(self) -> bool:
        """Return whether all copies are done, and note when the last one was."""
        if self._end:
            return True
        is_done = self._poll(self._groups[-1])  # copies of one direction end in their order
        now = time.perf_counter()
        if is_done:
            for group in self._groups[:-1]:
                while not self._poll(group):
                    os.sched_yield()
            # Since the last look; or this thread itself had to wait, and it is not known when.
            self._end = now - min((now - self._looked) / 2, MOST_EARLIER_SECONDS)
        self._looked = now
        return is_done

    def run(self, load: Load | None = None) -> float:
        """Copy, while `load` computes; return its products of a second."""
        self.start()
        if load is not None:
            return load.run(self.is_over)
        while not self.is_over():
            os.sched_yield()
        return 0.0

    def _prepare(self) -> None:
        raise NotImplementedError

    def _queue(self, group: Group, index: int) -> None:
        raise NotImplementedError

    def _poll(self, group: Group) -> bool:
        raise NotImplementedError


class RowOut(Row):
    """Copies to the host."""

    def _prepare(self) -> None:
        self._groups = []  # gives the host memory of the last run back first
        self._groups = self._lanes.make_groups(self._nbytes)

    def _queue(self, group: Group, index: int) -> None:
        # On the way out the latest next use goes first.
        self._lanes.start_out(group, COPIES - index)

    def _poll(self, group: Group) -> bool:
        return group.poll_out()


class RowIn(Row):
    """Copies back, of the same host memory again and again."""

    def _prepare(self) -> None:
        if not self._groups:
            out = RowOut(self._lanes, self._nbytes)
            out.run()
            self._groups = out._groups  # noqa: SLF001 - of the same family
        for group in self._groups:
            group.evict()

    def _queue(self, group: Group, index: int) -> None:
        self._lanes.start_in(group, index)

    def _poll(self, group: Group) -> bool:
        return group.poll_in()


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
        # Idle: copies wait for nothing. On the CPU the host's own order does that.
        self._idle: Stream | None = None if device.name == CPU else device.link.stream()
        self._producer = 0 if self._idle is None else self._idle.address

    def make_groups(self, nbytes: int, tier: Tier = Tier.HOST) -> list[Group]:
        """Return the groups of a row: storages that are on the device."""
        return [Group(self.scheduler, nbytes, tier) for _ in range(COPIES)]

    def start_out(self, group: Group, next_use: int) -> None:
        """Queue a copy to the host."""
        self._start(group, group.copy_out, self.source, next_use)

    def start_in(self, group: Group, next_use: int) -> None:
        """Queue a copy back."""
        self._start(group, group.copy_in, self.target, next_use)

    def _start(
        self, group: Group, copy: Start, memory: torch.UntypedStorage, next_use: int
    ) -> None:
        """Queue a copy, which holds the device memory until it is done."""
        shim = self.device.runtime.shim
        owner = memory._cdata  # noqa: SLF001
        try:
            shim.hold(owner)
            copy(memory.data_ptr(), owner=owner, next_use=next_use, producer=self._producer)
        except BaseException:
            if group.state in NOT_STARTED:  # else interrupted with the copy under way
                shim.drop(owner)
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
