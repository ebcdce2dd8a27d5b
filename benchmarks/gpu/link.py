"""How fast the swap engine copies, beside plain copies of torch between pinned memory and device.

In both cases as many ranges as make up the traffic are copied in the given size: out, back, both
at once (half of them each way), and both again while matrix products run. The time is the host's,
from the first call until everything is done. Both take turns; the ratio is the median over the
turns of the engine's bandwidth to torch's.
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from benchmarks.gpu.measure import is_cuda, make_event, make_stream, median_of, synchronize
from benchmarks.gpu.report import Check
from swapkit._native.backend import Backend
from swapkit._native.sched import Group, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.context import Context

MIB = 1 << 20
SIZES = {"1MiB": MIB, "8MiB": 8 * MIB, "64MiB": 64 * MIB, "256MiB": 256 * MIB, "1GiB": 1024 * MIB}
QUICK_SIZES = ("1MiB", "64MiB", "256MiB")
DRY_SIZES = ("1MiB", "8MiB")
TRAFFIC = 2048 * MIB  # one way
FEWEST, MOST = 2, 512  # ranges
ROUNDS, FEWER_ROUNDS = 7, 3
TARGET = 0.95
PRODUCT = 8192
PRODUCTS = 24
OWNER = 1  # the ranges outlive the copies, so nobody has to be told
SECONDS_FOR_A_SIZE = 8.0


class Copier(Protocol):
    """Copies ranges of one device buffer."""

    def out(self, ranges: range) -> None:
        """Copy to the host, and wait."""

    def back(self, ranges: range) -> None:
        """Copy to the device, and wait."""

    def both(self, out: range, back: range) -> None:
        """Do both at once, and wait."""


class Engine:
    """swapkit's scheduler."""

    def __init__(self, device: str, buffer: torch.Tensor, nbytes: int) -> None:
        self._waits = is_cuda(device)
        # Of C: the threads that end copies would wait for the interpreter's lock to call Python.
        drop = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
        self._backend = Backend.cuda(device=0) if is_cuda(device) else Backend.cpu()
        self._scheduler = Scheduler(self._backend, drop_owner=drop.value or 0)
        self._start = buffer.data_ptr()
        self._nbytes = nbytes
        self._groups: dict[int, Group] = {}

    def out(self, ranges: range) -> None:
        """Copy to the host in new groups, and wait."""
        self.both(ranges, range(0))

    def back(self, ranges: range) -> None:
        """Copy what went out before to the device, and wait."""
        self.both(range(0), ranges)

    def both(self, out: range, back: range) -> None:
        """Do both at once, and wait: what finishes a transfer only orders the default stream."""
        self._queue_out(out)
        self._queue_back(back)
        self._finish_out(out)
        self._finish_back(back)
        if self._waits:
            torch.cuda.default_stream().synchronize()

    def _queue_out(self, ranges: range) -> None:
        for index in ranges:
            self._groups.pop(index, None)
            group = self._groups[index] = Group(self._scheduler, self._nbytes)
            group.copy_out(self._address(index), owner=OWNER, next_use=index)

    def _finish_out(self, ranges: range) -> None:
        for index in ranges:
            self._groups[index].finish_out()
            self._groups[index].evict()

    def _queue_back(self, ranges: range) -> None:
        for index in ranges:
            self._groups[index].copy_in(self._address(index), owner=OWNER, next_use=index)

    def _finish_back(self, ranges: range) -> None:
        for index in ranges:
            self._groups[index].finish_in()
            self._groups[index].evict()

    def _address(self, index: int) -> int:
        return self._start + index * self._nbytes


class Raw:
    """torch's asynchronous copies to and from pinned tensors, in a stream for each direction."""

    def __init__(self, device: str, buffer: torch.Tensor, nbytes: int) -> None:
        self._device = device
        self._parts = torch.split(buffer, nbytes)
        pinned = is_cuda(device)
        self._host = [torch.empty(nbytes, dtype=torch.uint8) for _ in self._parts]
        if pinned:
            self._host = [tensor.pin_memory() for tensor in self._host]
            self._streams = make_stream(), make_stream()

    def out(self, ranges: range) -> None:
        """Copy to the host, and wait."""
        self.both(ranges, range(0))

    def back(self, ranges: range) -> None:
        """Copy to the device, and wait."""
        self.both(range(0), ranges)

    def both(self, out: range, back: range) -> None:
        """Do both at once, and wait."""
        if not is_cuda(self._device):
            self._queue(out, back)
            return
        with torch.cuda.stream(self._streams[0]):
            self._queue(out, range(0))
        with torch.cuda.stream(self._streams[1]):
            self._queue(range(0), back)
        for stream in self._streams:
            stream.synchronize()

    def _queue(self, out: range, back: range) -> None:
        for index in out:
            self._host[index].copy_(self._parts[index], non_blocking=True)
        for index in back:
            self._parts[index].copy_(self._host[index], non_blocking=True)


class Products:
    """Matrix products in bf16 that keep the device busy."""

    def __init__(self, device: str, width: int) -> None:
        self._device = device
        self._left = torch.randn(width, width, device=device).to(torch.bfloat16)
        self._right = torch.randn(width, width, device=device).to(torch.bfloat16)
        self._result = torch.empty_like(self._left)
        # Not the default stream, which the engine's copies would be ordered behind.
        self._stream = make_stream() if is_cuda(device) else None
        synchronize(device)

    def queue(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._result)

    def seconds(self, count: int, meanwhile: Callable[[], object] | None = None) -> float:
        """Return how long so many take, with something else going on or without."""
        if self._stream is None:
            begin = time.perf_counter()
            self.queue(count)
            end = time.perf_counter()
            if meanwhile is not None:
                meanwhile()
            return end - begin
        events = [make_event() for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            events[0].record()
            self.queue(count)
            events[1].record()
        if meanwhile is not None:
            meanwhile()
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1e3


class Rig:
    """Both copiers over one buffer of one size of range."""

    def __init__(self, device: str, nbytes: int, traffic: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.count = max(FEWEST, min(MOST, traffic // nbytes)) // 2 * 2
        self.buffer = torch.randint(256, (self.count * nbytes,), dtype=torch.uint8, device=device)
        synchronize(device)
        self.copiers: dict[str, Copier] = {
            "engine": Engine(device, self.buffer, nbytes),
            "raw": Raw(device, self.buffer, nbytes),
        }
        self.all = range(self.count)
        self.first, self.second = range(self.count // 2), range(self.count // 2, self.count)

    def is_right(self, copier: Copier) -> bool:
        """Return whether bytes that go out come back as they were; also warms up."""
        expected = self.buffer.clone()
        copier.out(self.all)
        self.buffer.zero_()
        synchronize(self.device)
        copier.back(self.all)
        same = torch.equal(self.buffer, expected)
        copier.both(self.first, self.second)
        return same

    def rates(self, copier: Copier) -> dict[str, float]:
        """Return the gigabytes a second of each pattern, once."""
        whole = self.count * self.nbytes / 1e9
        return {
            "out": whole / seconds_of(lambda: copier.out(self.all)),
            "back": whole / seconds_of(lambda: copier.back(self.all)),
            "both": whole / seconds_of(lambda: copier.both(self.first, self.second)),
        }


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def note_seconds(took: list[float], call: Callable[[], object]) -> None:
    took.append(seconds_of(call))


def measure_size(context: Context, name: str, rounds: int) -> None:
    """Compare the copiers for one size of range."""
    rig = Rig(context.device, SIZES[name], 16 * MIB if context.dry else TRAFFIC)
    right = [rig.is_right(copier) for copier in rig.copiers.values()]
    context.report.check(
        Check(
            name=f"bytes_{name}",
            text=f"{name}: bytes come back as they went out",
            value=float(all(right)),
            at_least=1,
            promise=True,
        )
    )
    rates: dict[str, list[dict[str, float]]] = {copier: [] for copier in rig.copiers}
    for index in range(rounds):
        copiers = list(rig.copiers.items())
        for copier_name, copier in copiers if index % 2 == 0 else reversed(copiers):
            rates[copier_name].append(rig.rates(copier))
    for pattern in ("out", "back", "both"):
        show_rates(context, f"{pattern}_{name}", pattern, rates)


def show_rates(
    context: Context, row: str, pattern: str, rates: dict[str, list[dict[str, float]]]
) -> None:
    """Put one pattern's row and check."""
    engine, raw = ([rate[pattern] for rate in rates[name]] for name in ("engine", "raw"))
    ratio = median_of(a / b for a, b in zip(engine, raw, strict=True))
    context.report.row(
        "copies of the swap engine, and of torch with pinned memory",
        row,
        {
            "engine_gb_per_s": median_of(engine),
            "pinned_gb_per_s": median_of(raw),
            "ratio": ratio,
        },
    )
    if not context.dry:
        context.report.check(
            Check(name=row, text=f"{row}: engine / pinned", value=ratio, at_least=TARGET)
        )


def measure_busy(context: Context, rounds: int) -> None:
    """Copy both ways while matrix products run; neither should be slower than with torch's."""
    size, traffic = ("1MiB", 16 * MIB) if context.dry else ("64MiB", TRAFFIC)
    rig = Rig(context.device, SIZES[size], traffic)
    products = Products(context.device, 128 if context.dry else PRODUCT)
    for copier in rig.copiers.values():
        rig.is_right(copier)
    count = 1 if context.dry else PRODUCTS
    products.seconds(count)
    alone: list[float] = []
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in rig.copiers}
    slower: dict[str, list[float]] = {name: [] for name in rig.copiers}
    for _ in range(rounds):
        alone.append(products.seconds(count))
        for name, copier in rig.copiers.items():
            took: list[float] = []
            copy = partial(note_seconds, took, partial(copier.both, rig.first, rig.second))
            slower[name].append(products.seconds(count, copy) / alone[-1])
            rates[name].append({"busy": rig.count * rig.nbytes / 1e9 / took[0]})
    show_rates(context, "busy_64MiB", "busy", rates)
    context.report.row(
        "matrix products during copies; ratio: to those alone",
        "products",
        {
            "alone_ms": (median_of(alone) or 0) * 1e3,
            "engine_ratio": median_of(slower["engine"]),
            "pinned_ratio": median_of(slower["raw"]),
        },
    )


def run(context: Context) -> None:
    """Measure every size, then under load."""
    names = list(SIZES)
    if context.dry or context.quick:
        names = list(DRY_SIZES if context.dry else QUICK_SIZES)
    rounds = FEWER_ROUNDS if context.dry or context.quick else ROUNDS
    for name in names:
        if context.seconds_left() < SECONDS_FOR_A_SIZE:
            context.report.note(f"not run: out of time: {name}")
            continue
        measure_size(context, name, rounds)
    measure_busy(context, rounds)
