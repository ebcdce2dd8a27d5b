"""Measurement of a device's copy speeds during compute, through the schedulers of sessions.

Bursts of copies run while matrix products keep the compute stream busy. Speeds are low percentiles
of a few samples: a plan that assumes too low a speed loses little, one that assumes too much
stalls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swapkit._native.sched import Scheduler
from swapkit._runtime.machine.copy_bursts import (
    COPIES,
    LEAST_BYTES,
    PAGE_BYTES,
    Bench,
    Burst,
    BurstIn,
    BurstOut,
    Lanes,
    Sample,
    make_bench,
)
from swapkit._runtime.saved.device import Device, Limits
from swapkit.errors import DiskError
from swapkit.ir.plans import Tier
from swapkit.units import format_bytes

MOST_BYTES = 16 << 20  # per copy
# Small copies show the fixed cost of a copy; the CPU runs still smaller ones synchronously.
SMALL_BYTES = 68 << 10
BURST_SECONDS = 0.06  # long, since a copy thread may itself wait for a processor
ROUNDS = 5
LEAST_ROUNDS = 2
SECONDS = 0.8  # after this, no further round begins
LOW = 0.2  # the share of samples below the reported speed
STEADY = 1.5  # at most this ratio of the reported copy time to the fastest
MOST_INTERFERENCE = 1.0  # copies take as much of the device as compute does
# Copies and products each take at most one of this many parts of the free memory.
PARTS_OF_ROOM = 8
HOST_COPIES = 2 * (COPIES + 1)  # both directions at once, and small copies
DISK_LEAST_BYTES = 1 << 20
DISK_SECONDS = 0.1
DISK_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The measured fields of `swapkit.ir.machines.Machine`, with the same names.

    `is_steady`: the samples agreed. If not, other programs disturbed them.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    out_latency_seconds: float
    in_latency_seconds: float
    duplex: float
    interference: float
    is_steady: bool = True


def measure_speeds(device: Device, *, room_bytes: int, host_bytes: int | None) -> Speeds:
    """Measure both directions of a device's link.

    Args:
        device: the device; a new scheduler copies over its link.
        room_bytes: free device memory; part of it, at most 56 MiB, is taken temporarily.
        host_bytes: maximum host memory for copies, which take at most 128 MiB; None: no limit.

    Raises:
        OverBudget: no device memory is free without a rescue.
        SwapkitError: a copy failed.
    """
    most_bytes = min(MOST_BYTES, room_bytes // PARTS_OF_ROOM)
    if host_bytes is not None:
        most_bytes = min(most_bytes, host_bytes // (HOST_COPIES + 1))
    most_bytes = max(LEAST_BYTES, most_bytes // PAGE_BYTES * PAGE_BYTES)
    # With the limit of sessions: how host memory is locked, and so copied, depends on the limit.
    if host_bytes is not None:  # a session's limit may be too low to measure with
        host_bytes = max(host_bytes, (HOST_COPIES + 1) * most_bytes)
    scheduler = device.new_scheduler(Limits(host_bytes=host_bytes), copies_in_flight=COPIES)
    try:
        lanes = Lanes(device, scheduler, most_bytes)
        bench = make_bench(device, most_bytes=room_bytes // PARTS_OF_ROOM)
        return _Rounds(lanes, bench).measure()
    finally:
        scheduler.drain()
        scheduler.trim()


class _Way:
    """Samples of one direction: seconds of a large copy and of a small one."""

    def __init__(self, kind: type[Burst], lanes: Lanes, bench: Bench, nbytes: int) -> None:
        self.large = kind(lanes, nbytes)
        self.large_seconds = 0.0  # of a copy in the latest sample
        self._small = kind(lanes, SMALL_BYTES)
        self._bench = bench
        self._nbytes = nbytes
        self.forget()

    def forget(self) -> None:
        """Discard all samples so far."""
        self._large: list[Sample] = []
        self._smalls: list[Sample] = []

    def measure(self) -> None:
        """Take one sample of each size."""
        self._smalls.append(self._bench.run([self._small]))
        self._large.append(self._bench.run([self.large]))
        self.large_seconds = _seconds(self._large[-1])

    @property
    def is_steady(self) -> bool:
        """Whether the fastest sample is close to the reported speed."""
        samples = [*self._large, *self._smalls]
        return all(each.is_sure for each in samples) and is_steady(list(map(_seconds, self._large)))

    def conclude(self) -> tuple[float, float]:
        """Return bytes per second and the fixed seconds of each copy."""
        seconds, small_seconds = (list(map(_seconds, of)) for of in (self._large, self._smalls))
        return find_speed(self._nbytes, seconds, small_seconds)

    def interference(self, alone: Sequence[Sample]) -> float:
        """Return the relative slowdown of compute during the large copies."""
        product = low([each.product for each in alone])
        return find_interference(product, [(each.product, each.shared) for each in self._large])


class _Rounds:
    """Samples of all quantities, taken in turn."""

    def __init__(self, lanes: Lanes, bench: Bench) -> None:
        nbytes, seconds = _choose_bytes(lanes, bench)
        bench.fit(COPIES * seconds)
        self._bench = bench
        self._ways = [_Way(kind, lanes, bench, nbytes) for kind in (BurstOut, BurstIn)]
        self._duplexes: list[float] = []
        self._alone: list[Sample] = []  # without copies

    def measure(self) -> Speeds:
        """Measure for `ROUNDS` rounds or about a second."""
        self._run()
        for way in self._ways:
            way.forget()  # the first round ran on new host memory
        self._duplexes.clear()
        self._alone.clear()
        begin = time.perf_counter()
        for index in range(ROUNDS):
            if index >= LEAST_ROUNDS and time.perf_counter() - begin > SECONDS:
                break
            self._run()
        (out_speed, out_latency), (in_speed, in_latency) = (way.conclude() for way in self._ways)
        return Speeds(
            out_bytes_per_second=out_speed,
            in_bytes_per_second=in_speed,
            out_latency_seconds=out_latency,
            in_latency_seconds=in_latency,
            duplex=statistics.median(self._duplexes),
            interference=statistics.mean(way.interference(self._alone) for way in self._ways),
            is_steady=all(way.is_steady for way in self._ways),
        )

    def _run(self) -> None:
        for way in self._ways:
            self._alone.append(self._bench.run([]))
            way.measure()
        both = self._bench.run([way.large for way in self._ways])
        alone = [way.large_seconds for way in self._ways]
        self._duplexes.append(find_duplex(alone[0], alone[1], _seconds(both)))


def _choose_bytes(lanes: Lanes, bench: Bench) -> tuple[int, float]:
    """Return the bytes of a copy so that a burst takes `BURST_SECONDS`, and the copy's seconds."""
    nbytes, seconds = LEAST_BYTES, 0.0
    for _ in range(3):  # closer each time: a small copy's latency hides the speed
        seconds = _seconds(bench.run([BurstOut(lanes, nbytes)]))
        wanted = int(nbytes * BURST_SECONDS / COPIES / seconds)
        chosen = max(LEAST_BYTES, min(lanes.nbytes, wanted // PAGE_BYTES * PAGE_BYTES))
        seconds *= chosen / nbytes
        nbytes = chosen
    return nbytes, seconds


def _seconds(sample: Sample) -> float:
    """Return the seconds per copy of a burst; all bursts of a sample ran at once."""
    return sample.copying / COPIES


def find_speed(
    nbytes: int, seconds: Sequence[float], small_seconds: Sequence[float]
) -> tuple[float, float]:
    """Return bytes per second and the fixed seconds of each copy.

    Args:
        nbytes: of a copy.
        seconds: samples of the time of such a copy.
        small_seconds: samples of the time of a copy of `SMALL_BYTES`.
    """
    small = low(small_seconds)  # occasional delays are not part of a copy's own time
    speed = low([(nbytes - SMALL_BYTES) / max(each - small, each / 2) for each in seconds])
    return speed, max(0.0, small - SMALL_BYTES / speed)


def is_steady(seconds: Sequence[float]) -> bool:
    """Return whether samples of the same copy agree, except for some of the slowest."""
    return -low([-each for each in seconds]) <= STEADY * min(seconds)


def find_duplex(out_seconds: float, in_seconds: float, both_seconds: float) -> float:
    """Return the combined speed of both directions relative to one direction, from 1 to 2.

    Args:
        out_seconds: time of a copy out alone.
        in_seconds: time of a copy in alone.
        both_seconds: from the start of both copies to the end of the later one.
    """
    shorter, longer = sorted((out_seconds, in_seconds))
    # Until the shorter copy ends, both run at `duplex / 2` of their speed; then one runs at full.
    shared = both_seconds - (longer - shorter)
    return min(2.0, max(1.0, 2 * shorter / shared)) if shared > 0 else 2.0


def find_interference(alone: float, beside: Sequence[tuple[float, float]]) -> float:
    """Return the relative slowdown of compute while copies run; 0: none.

    Other programs only slow compute down, so the faster samples are compared.

    Args:
        alone: seconds of a product without copies; 0: nothing was computed.
        beside: seconds of a product with copies, and the fraction of them in which copies ran.
    """
    found = []
    for seconds, shared in beside:
        lost = seconds - alone
        rest = seconds * shared - lost  # the time beside copies, minus the slowdown
        found.append(lost / rest if rest > 0 else MOST_INTERFERENCE)
    if alone <= 0 or not found:
        return 0.0
    return min(MOST_INTERFERENCE, max(0.0, low(found)))


def low(values: Sequence[float]) -> float:
    """Return the value that a share `LOW` of all values are below."""
    return sorted(values)[int(LOW * len(values))]


def measure_disk(
    device: Device, folder: Path, *, room_bytes: int, disk_bytes: int
) -> tuple[float, float]:
    """Return the bytes per second that a disk writes and reads, regardless of the device's link.

    Raises:
        DiskError: the disk could not be written or read.
    """
    most_bytes = min(MOST_BYTES, room_bytes // PARTS_OF_ROOM, disk_bytes // HOST_COPIES)
    most_bytes = max(LEAST_BYTES, most_bytes // PAGE_BYTES * PAGE_BYTES)
    scheduler = Scheduler(
        device.backend,
        drop_owner=device.shared.shim.drop_address,
        host_limit_bytes=HOST_COPIES * most_bytes,
        disk=folder,
        disk_limit_bytes=disk_bytes,
    )
    lanes = Lanes(device, scheduler, most_bytes)
    nbytes = min(lanes.nbytes, DISK_LEAST_BYTES)
    writes, reads = [], []
    for index in range(1 + DISK_ROUNDS):
        write, read = _run_disk(lanes, nbytes)
        if index == 0:  # discarded: the file is new
            nbytes = min(lanes.nbytes, int(min(write, read) * DISK_SECONDS / COPIES))
            nbytes = max(LEAST_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES)
            continue
        writes.append(write)
        reads.append(read)
    return low(writes), low(reads)


def _run_disk(lanes: Lanes, nbytes: int) -> tuple[float, float]:
    """Write and read once; return the bytes per second of each."""
    scheduler = lanes.scheduler
    groups = lanes.make_groups(nbytes, Tier.DISK)
    before = scheduler.stats().written_bytes
    begin = time.perf_counter()
    for index, group in enumerate(groups):
        lanes.start_out(group, COPIES - index)
    for group in groups:
        group.finish_out()
        group.evict()
    scheduler.drain()
    written = time.perf_counter()
    written_bytes = scheduler.stats().written_bytes - before
    if written_bytes < COPIES * nbytes:  # bytes that cannot be written stay on the host
        raise DiskError(
            f"cannot measure the speed of the disk: it took {format_bytes(written_bytes)} of "
            f"{format_bytes(COPIES * nbytes)}"
        )
    scheduler.trim()  # bytes still on the host would not be read from the disk
    begin_in = time.perf_counter()
    for index, group in enumerate(reversed(groups)):
        lanes.start_in(group, index)
    for group in reversed(groups):
        group.finish_in()
    seconds = time.perf_counter() - begin_in
    return COPIES * nbytes / (written - begin), COPIES * nbytes / seconds
