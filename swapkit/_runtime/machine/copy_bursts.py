"""Bursts of copies, and their times beside matrix products."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swapkit._native.pool import tentative
from swapkit._native.sched import CLEAN, Group, Scheduler
from swapkit._runtime.optimizer.state_slots import start_copy
from swapkit._runtime.saved.device import CPU, Device
from swapkit._runtime.torch_compat.stream_delays import DELAY_SECONDS, Delays
from swapkit.errors import OverBudget
from swapkit.ir.plans import Tier
from swapkit.units import format_bytes

# ---- copy bursts ---------------------------------------------------------------------------------
#
# Bursts of copies, used to measure copy speeds.
#
# A *burst* is a few copies in one direction, queued at once, like those of a session. All device
# memory is allocated tentatively: a measurement never starts a rescue.

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


# ---- overlap -------------------------------------------------------------------------------------
#
# Timing of bursts of copies beside matrix products, with the device's own clock.
#
# On a device with streams, both are queued behind a delay and timed with events, so the host's
# launch overhead is in no time. On the CPU, the host's clock is used.

# Widths of products: one takes about as long as a small operator, to see a burst's end in time.
CPU_WIDTH, GPU_WIDTH, LEAST_WIDTH = 256, 2048, 64
# A simulated device takes seconds for a product that takes a GPU microseconds.
MOST_PRODUCT_SECONDS = 0.005
MOST_EARLIER_SECONDS = 0.0005
_GROWTH = 8  # factor of a product's work when its width doubles
LEAST_CHAIN, MOST_CHAIN = 8, 64  # products queued at once
MOST_DELAY_SECONDS = 0.064  # enough for any host to queue that many calls
ALONE_SECONDS = 0.015  # of products without copies, on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample, in seconds."""

    copying: float  # from the start of all copies to the end of the last; 0: no copies
    product: float  # of one product; 0: nothing was computed
    shared: float  # the fraction of the products' time in which copies ran, from 0 to 1
    is_sure: bool = True  # the device did not wait for the host


class Bench:
    """Runs bursts of copies beside products."""

    def run(self, bursts: Sequence[Burst]) -> Sample:
        """Run all copies of the bursts at once beside products. No bursts: only products."""
        raise NotImplementedError

    def fit(self, seconds: float) -> None:
        """Set the compute time of later runs, if a run does not end with its copies."""


class HostBench(Bench):
    """The CPU: computes products until the copies end."""

    def __init__(self, device: Device, *, most_bytes: int) -> None:
        """Allocate memory for products; if none is free, nothing is computed."""
        self._factors = _take_factors(device, CPU_WIDTH, torch.float32, most_bytes)

    def run(self, bursts: Sequence[Burst]) -> Sample:
        """Compute until all bursts are over."""
        for burst in bursts:
            burst.prepare()
        begin = self._looked = time.perf_counter()
        _queue(bursts)
        is_over = self._watch(bursts) if bursts else lambda: self._looked - begin >= ALONE_SECONDS
        count = 0
        while not is_over():
            if self._factors is None:
                os.sched_yield()
            else:
                _multiply(self._factors)
                count += 1
            self._looked = time.perf_counter()
        seconds = time.perf_counter() - begin
        return Sample(
            copying=self._end - begin if bursts else 0.0,
            product=seconds / count if count else 0.0,
            shared=1.0 if bursts else 0.0,
        )

    def _watch(self, bursts: Sequence[Burst]) -> Callable[[], bool]:
        """Return a function that polls all copies and notes the end of the last."""

        def is_over() -> bool:
            if not all(burst.poll() for burst in bursts):
                return False
            # The end lies after the last poll; this thread may have waited, so cap the correction.
            now = time.perf_counter()
            self._end = now - min((now - self._looked) / 2, MOST_EARLIER_SECONDS)
            return True

        return is_over


class StreamBench(Bench):
    """A device with streams: times work queued behind a delay, with events."""

    def __init__(self, device: Device, *, most_bytes: int) -> None:
        """Allocate memory for products; if none is free, nothing is computed."""
        self._device = device
        self._module: Any = getattr(torch, device.name.type)
        self._chain = LEAST_CHAIN
        self._delay = DELAY_SECONDS
        self._delays = Delays(device.name)
        self._stream = self._module.current_stream(device.name)  # where products run
        self._waiting = self._module.Stream(device.name)  # for the copies
        with self._module.stream(self._waiting):
            self._consumer = device.current_stream()
        with tentative():
            self._delays.cover(self._stream)  # the first delay may take memory
        self._factors = self._narrow(_take_factors(device, GPU_WIDTH, torch.float16, most_bytes))

    def _narrow(self, factors: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Return the widest parts of factors whose product the device computes quickly."""
        if factors is None:
            return None
        most = factors[0].shape[0]
        width, seconds = LEAST_WIDTH, 0.0
        narrow = _cut(factors, width)
        _multiply(narrow)  # a library may initialize at the first product
        while 2 * width <= most and seconds * _GROWTH <= MOST_PRODUCT_SECONDS:
            width *= 2
            narrow = _cut(factors, width)
            self._module.synchronize(self._device.name)
            begin = time.perf_counter()
            _multiply(narrow)
            self._module.synchronize(self._device.name)
            seconds = time.perf_counter() - begin
        return narrow

    def fit(self, seconds: float) -> None:
        """Choose how many products are queued."""
        product = self.run([]).product
        if product > 0:
            self._chain = max(LEAST_CHAIN, min(MOST_CHAIN, round(seconds / product)))

    def run(self, bursts: Sequence[Burst]) -> Sample:
        """Queue copies and products; repeat behind a longer delay if the host was too slow."""
        while True:
            sample = self._run(bursts)
            if sample.is_sure or self._delay >= MOST_DELAY_SECONDS:
                return sample
            self._delay = min(MOST_DELAY_SECONDS, 2 * self._delay)

    def _run(self, bursts: Sequence[Burst]) -> Sample:
        for burst in bursts:
            burst.prepare()
        begin, computed, copied = (self._module.Event(enable_timing=True) for _ in range(3))
        self._module.synchronize(self._device.name)  # the delay begins now
        self._delays.cover(self._stream, self._delay)
        begin.record(self._stream)
        _queue(bursts, self._device.current_stream())
        for burst in bursts:
            burst.finish(self._consumer)
        copied.record(self._waiting)
        if self._factors is not None:
            for _ in range(self._chain):
                _multiply(self._factors)
        computed.record(self._stream)
        is_sure = not begin.query()
        self._module.synchronize(self._device.name)
        for burst in bursts:
            burst.settle()
        computing = begin.elapsed_time(computed) / 1e3
        copying = begin.elapsed_time(copied) / 1e3 if bursts else 0.0
        return Sample(
            copying=copying,
            product=0.0 if self._factors is None else computing / self._chain,
            shared=min(1.0, copying / computing) if computing > 0 else 0.0,
            is_sure=is_sure,
        )


def make_bench(device: Device, *, most_bytes: int) -> Bench:
    """Return a bench for a device, whose products take at most `most_bytes`."""
    kind = HostBench if device.name == CPU else StreamBench
    return kind(device, most_bytes=most_bytes)


def _queue(bursts: Sequence[Burst], producer: int = 0) -> None:
    """Queue the copies of bursts in turn, behind the work on the `producer` stream."""
    for index in range(COPIES):
        for burst in bursts:
            burst.queue(index, producer)


def _cut(factors: Sequence[torch.Tensor], width: int) -> list[torch.Tensor]:
    """Return factors of `width` rows and columns in the memory of wider ones."""
    return [each.view(-1)[: width * width].view(width, width) for each in factors]


def _multiply(factors: Sequence[torch.Tensor]) -> None:
    first, second, product = factors
    torch.mm(first, second, out=product)


def _take_factors(
    device: Device, width: int, dtype: torch.dtype, most_bytes: int
) -> list[torch.Tensor] | None:
    """Return two factors and memory for their product; None: too little memory is free."""
    while width >= LEAST_WIDTH:
        if 3 * width * width * dtype.itemsize <= most_bytes:
            try:
                with tentative():
                    shape, value = (width, width), 1 / width
                    factors = [
                        torch.full(shape, value, dtype=dtype, device=device.name) for _ in range(3)
                    ]
                    _multiply(factors)  # a library may allocate memory at the first product
            except torch.OutOfMemoryError:
                pass
            else:
                return factors
        width //= 2
    return None
