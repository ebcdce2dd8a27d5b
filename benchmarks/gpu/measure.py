"""Time and memory of a CUDA device, or of the CPU in a dry run; and what identifies gradients."""

from __future__ import annotations

import contextlib
import inspect
import resource
import statistics
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SAMPLE_SECONDS = 0.002
CHUNK = 1 << 19  # elements that are hashed at a time: little memory beside what is measured
MASK = (1 << 64) - 1


def is_cuda(device: str) -> bool:
    """Return whether the device is a GPU."""
    return device.startswith("cuda")


def synchronize(device: str) -> None:
    """Wait for everything that was queued."""
    if is_cuda(device):
        torch.cuda.synchronize(device)


def time_steps(step: Callable[[], object], count: int, device: str) -> list[float]:
    """Run so many steps one after the other; return the milliseconds of each.

    On a GPU the time is between events in the stream, so that the host may run ahead.
    """
    if not is_cuda(device):
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [(end - begin) * 1e3 for begin, end in pairwise(marks)]
    torch.cuda.synchronize(device)
    events = [make_event() for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def make_event() -> torch.cuda.Event:
    """Return an event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_stream() -> torch.cuda.Stream:
    """Return a stream of its own."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def median_of(values: Iterable[float]) -> float | None:
    """Return the median, or None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def spread_of(values: Iterable[float]) -> float | None:
    """Return how far the middle half lies apart, as a share of the median."""
    found = list(values)
    if len(found) < 2:
        return None
    low, middle, high = statistics.quantiles(found, n=4)
    return (high - low) / middle


class Peaks:
    """The most memory that was in use and reserved, by the counters of whose allocator it is."""

    def __init__(self, device: str, *, pool: bool) -> None:
        """Read swapkit's pool, or torch's own allocator (which the CPU has no counters for)."""
        self._device = device
        self._pool = pool

    def reset(self) -> None:
        """Begin anew."""
        if self._pool:
            call_of_pool("reset_peak_memory_stats", self._device)
        elif is_cuda(self._device):
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> dict[str, int | None]:
        """Return the peaks since then."""
        stats = allocator_stats(self._device, pool=self._pool)
        return {
            "in_use_peak_bytes": stats.get("allocated_bytes.all.peak"),
            "reserved_peak_bytes": stats.get("reserved_bytes.all.peak"),
        }


def allocator_stats(device: str, *, pool: bool) -> dict[str, int]:
    """Return the counters of swapkit's pool, or of torch's allocator; the CPU's has none."""
    if pool:
        stats: dict[str, int] = call_of_pool("memory_stats", device)
        return stats
    return torch.cuda.memory_stats(device) if is_cuda(device) else {}


def call_of_pool(name: str, device: str) -> Any:  # noqa: ANN401 - whatever it returns
    """Call one of swapkit's statistics functions, of the device if it takes one."""
    import swapkit

    function = getattr(swapkit, name)
    if "device" in inspect.signature(function).parameters:
        return function(device=device)
    return function()


class DeviceUse:
    """The most memory of the device that was taken while it was watched, by the driver's word."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = self._read()
        self.peak_bytes: int | None = 0 if is_cuda(device) else None

    def _read(self) -> int:
        if not is_cuda(self._device):
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def sample(self) -> None:
        """Look once."""
        if self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, self._read() - self._before)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look every few milliseconds, from a thread of its own; not while time is taken."""
        if self.peak_bytes is None:
            yield
            return
        done = threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_SECONDS):
                self.sample()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.sample()


def host_peak_bytes() -> int:
    """Return the most memory of the host that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return what identifies the bits of tensors, computed where they are with little memory.

    Sums of integers, so the order in which a device adds does not matter; weights make it depend on
    the place of each element.
    """
    total = 0
    for index, tensor in enumerate(tensors):
        total = (total * 0x9E3779B97F4A7C15 + digest_one(tensor) + index) & MASK
    return f"{total:016x}"


@torch.no_grad()
def digest_one(tensor: torch.Tensor) -> int:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()])
    length = min(CHUNK, max(flat.numel(), 1))
    places = torch.arange(length, dtype=torch.int64, device=tensor.device)
    weights = (places * 0x2545F4914F6CDD1D).bitwise_xor_(places << 17).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, flat.numel(), length):
        part = flat[begin : begin + length].to(torch.int64)
        part.mul_(weights[: part.numel()])
        total.mul_(0x100000001B3).add_(part.sum())
    return int(total.item()) & MASK
