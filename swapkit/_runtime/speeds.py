"""How fast a device copies while it computes: measured through what sessions copy with.

Rows of copies run while matrix products keep the compute stream busy. Speeds are low percentiles of
few samples: a plan that counts on less than there is loses little, one that counts on more stalls.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._native.sched import Scheduler, Tier
from swapkit._runtime.rows import COPIES, LEAST_BYTES, PAGE_BYTES, Lanes, Load, RowIn, RowOut
from swapkit.errors import DiskError
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from swapkit._runtime.device import Device
    from swapkit._runtime.rows import Row

MOST_BYTES = 16 << 20  # of a copy
# What a copy costs beside its bytes shows in small ones; still smaller ones the CPU does at once.
SMALL_BYTES = 68 << 10
ROW_SECONDS = 0.06  # long, since a thread that is waited for may wait for a processor itself
ROUNDS = 5
LEAST_ROUNDS = 2
SECONDS = 0.8  # after that no further round begins
LOW = 0.2  # of the samples, how many are below the speed that is counted on
STEADY = 1.5  # a copy that is counted on takes at most so many times as long as the fastest
MOST_INTERFERENCE = 1.0  # copies that take as much of the device as computing does
# Of the memory that is free, one of this many parts is taken for copies, another for products.
PARTS_OF_ROOM = 8
HOST_COPIES = 2 * (COPIES + 1)  # both ways at once, and small ones
DISK_LEAST_BYTES = 1 << 20
DISK_SECONDS = 0.1
DISK_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What `swapkit.ir.machines.Machine` has of the same names.

    `is_steady`: the samples agreed; else other programs disturbed them.
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
        device: copies go through a scheduler of its own, over its link.
        room_bytes: of device memory; a part of it is taken for a moment, at most 56 MiB.
        host_bytes: most host memory for copies, of which at most 128 MiB are taken; None: any.

    Raises:
        OverBudget: there is no device memory to be had without a rescue.
        SwapkitError: a copy failed.
    """
    most_bytes = min(MOST_BYTES, room_bytes // PARTS_OF_ROOM)
    if host_bytes is not None:
        most_bytes = min(most_bytes, host_bytes // (HOST_COPIES + 1))
    most_bytes = max(LEAST_BYTES, most_bytes // PAGE_BYTES * PAGE_BYTES)
    scheduler = device.new_scheduler(host_limit_bytes=(HOST_COPIES + 1) * most_bytes)
    try:
        lanes = Lanes(device, scheduler, most_bytes)
        load = Load(device, most_bytes=room_bytes // PARTS_OF_ROOM)
        return _Rounds(lanes, load).measure()
    finally:
        scheduler.drain()
        scheduler.trim()


class _Way:
    """What was measured of one direction: seconds of a large copy and of a small one."""

    def __init__(self, kind: type[Row], lanes: Lanes, nbytes: int) -> None:
        self.large = kind(lanes, nbytes)
        self._small = kind(lanes, SMALL_BYTES)
        self._nbytes = nbytes
        self._large_seconds: list[float] = []
        self._small_seconds: list[float] = []

    def measure(self, load: Load) -> float:
        """Measure once; return the products of a second beside the large copies."""
        self._small.run(load)
        self._small_seconds.append(self._small.seconds)
        beside = self.large.run(load)
        self._large_seconds.append(self.large.seconds)
        return beside

    def forget(self) -> None:
        """Do not count what was measured so far."""
        self._large_seconds.clear()
        self._small_seconds.clear()

    @property
    def is_steady(self) -> bool:
        """Whether the best sample is not much better than what is counted on."""
        return is_steady(self._large_seconds)

    def conclude(self) -> tuple[float, float]:
        """Return bytes per second, and what each copy takes beside that."""
        return find_speed(self._nbytes, self._large_seconds, self._small_seconds)


class _Rounds:
    """Samples of everything, taking turns."""

    def __init__(self, lanes: Lanes, load: Load) -> None:
        nbytes = _choose_bytes(lanes, load)
        self._load = load
        self._out, self._in = (_Way(kind, lanes, nbytes) for kind in (RowOut, RowIn))
        self._duplexes: list[float] = []
        self._alone: list[float] = []  # products of a second, without copies
        self._beside: list[float] = []  # and with them

    def measure(self) -> Speeds:
        """Measure for `ROUNDS` rounds or about a second."""
        self._run()
        for way in (self._out, self._in):
            way.forget()  # the host's memory was new
        self._duplexes.clear()
        self._alone.clear()
        self._beside.clear()
        begin = time.perf_counter()
        for index in range(ROUNDS):
            if index >= LEAST_ROUNDS and time.perf_counter() - begin > SECONDS:
                break
            self._run()
        out_speed, out_latency = self._out.conclude()
        in_speed, in_latency = self._in.conclude()
        return Speeds(
            out_bytes_per_second=out_speed,
            in_bytes_per_second=in_speed,
            out_latency_seconds=out_latency,
            in_latency_seconds=in_latency,
            duplex=statistics.median(self._duplexes),
            interference=find_interference(self._alone, self._beside),
            is_steady=self._out.is_steady and self._in.is_steady,
        )

    def _run(self) -> None:
        for way in (self._out, self._in):
            self._alone.append(self._load.run(_after(ROW_SECONDS / 4)))
            self._beside.append(way.measure(self._load))
        self._duplexes.append(_measure_duplex(self._out.large, self._in.large, self._load))


def _choose_bytes(lanes: Lanes, load: Load) -> int:
    """Return how many bytes a copy has to have for a row to take about `ROW_SECONDS`."""
    nbytes = LEAST_BYTES
    for _ in range(3):  # closer each time: a small copy's latency hides the speed
        row = RowOut(lanes, nbytes)
        row.run(load)
        nbytes = int(nbytes * ROW_SECONDS / COPIES / row.seconds)
        nbytes = max(LEAST_BYTES, min(lanes.nbytes, nbytes // PAGE_BYTES * PAGE_BYTES))
    return nbytes


def _measure_duplex(out: Row, back: Row, load: Load) -> float:
    """Run both ways at once, each of which has just run alone."""
    alone = out.seconds, back.seconds
    begin = time.perf_counter()
    out.start()
    back.start()
    load.run(lambda: all([out.is_over(), back.is_over()]))
    return find_duplex(*alone, (max(out.end, back.end) - begin) / COPIES)


def find_speed(
    nbytes: int, seconds: Sequence[float], small_seconds: Sequence[float]
) -> tuple[float, float]:
    """Return bytes per second, and what each copy takes beside that.

    Args:
        nbytes: of a copy.
        seconds: that it took.
        small_seconds: that a copy of `SMALL_BYTES` took.
    """
    small = low(small_seconds)  # what is lost only sometimes is no copy's own time
    speed = low([(nbytes - SMALL_BYTES) / max(each - small, each / 2) for each in seconds])
    return speed, max(0.0, small - SMALL_BYTES / speed)


def is_steady(seconds: Sequence[float]) -> bool:
    """Return whether samples of the same copy agree but for some of the slowest."""
    return -low([-each for each in seconds]) <= STEADY * min(seconds)


def find_duplex(out_seconds: float, in_seconds: float, both_seconds: float) -> float:
    """Return the share of the speed that the directions have together, from 1 to 2.

    Args:
        out_seconds: that a copy out took alone.
        in_seconds: that a copy in took alone.
        both_seconds: from the start of both to the end of the later one.
    """
    shorter, longer = sorted((out_seconds, in_seconds))
    # Until the shorter one is over both have `duplex / 2` of their speed, then one has all of it.
    shared = both_seconds - (longer - shorter)
    return min(2.0, max(1.0, 2 * shorter / shared)) if shared > 0 else 2.0


def find_interference(alone: Sequence[float], beside: Sequence[float]) -> float:
    """Return how much longer computing takes while copies run, 0: not at all.

    Other programs only slow it down, so the better samples of both are compared.

    Args:
        alone: products of a second without copies.
        beside: and with them; 0: nothing was computed.
    """
    best_alone, best_beside = (-low([-each for each in values]) for values in (alone, beside))
    if best_beside <= 0:
        return 0.0
    return min(MOST_INTERFERENCE, max(0.0, best_alone / best_beside - 1))


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def low(values: Sequence[float]) -> float:
    """Return the value that `LOW` of all are below."""
    return sorted(values)[int(LOW * len(values))]


def measure_disk(
    device: Device, folder: Path, *, room_bytes: int, disk_bytes: int
) -> tuple[float, float]:
    """Return the bytes that a disk writes and reads in a second, whatever the device's link does.

    Raises:
        DiskError: it could not be written or read.
    """
    most_bytes = min(MOST_BYTES, room_bytes // PARTS_OF_ROOM, disk_bytes // HOST_COPIES)
    most_bytes = max(LEAST_BYTES, most_bytes // PAGE_BYTES * PAGE_BYTES)
    scheduler = Scheduler(
        device.backend,
        drop_owner=device.runtime.shim.drop_address,
        host_limit_bytes=HOST_COPIES * most_bytes,
        disk=folder,
        disk_limit_bytes=disk_bytes,
    )
    lanes = Lanes(device, scheduler, most_bytes)
    nbytes = min(lanes.nbytes, DISK_LEAST_BYTES)
    writes, reads = [], []
    for index in range(1 + DISK_ROUNDS):
        write, read = _run_disk(lanes, nbytes)
        if index == 0:  # not counted: the file is new
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
    if written_bytes < COPIES * nbytes:  # what cannot be written stays on the host
        raise DiskError(
            f"the speed of the disk cannot be measured: it took {format_bytes(written_bytes)} of "
            f"{format_bytes(COPIES * nbytes)}"
        )
    scheduler.trim()  # what is still on the host would not be read
    begin_in = time.perf_counter()
    for index, group in enumerate(reversed(groups)):
        lanes.start_in(group, index)
    for group in reversed(groups):
        group.finish_in()
    seconds = time.perf_counter() - begin_in
    return COPIES * nbytes / (written - begin), COPIES * nbytes / seconds
