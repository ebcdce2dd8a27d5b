"""Timing of bursts of copies beside matrix products, with the device's own clock.

On a device with streams, both are queued behind a delay and timed with events, so the host's launch
overhead is in no time. On the CPU, the host's clock is used.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swapkit._native.pool import tentative
from swapkit._runtime.machine.copy_bursts import COPIES
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.torch_compat.stream_delays import DELAY_SECONDS, Delays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._runtime.machine.copy_bursts import Burst
    from swapkit._runtime.saved.device import Device

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
