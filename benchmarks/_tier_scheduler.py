"""Measurement of a scheduler's tiers for `tiers.py`: `_tier_scheduler.py host|disk FOLDER [...]`.

Prints one line of JSON. "host" copies odd sizes to the host. "disk" writes and reads with the disk
tier, `dd` and, if installed, fio, in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from swapkit._native.backend import Backend
from swapkit._native.sched import Group, Scheduler
from swapkit._runtime.optimizer.state_slots import Start, start_copy
from swapkit._runtime.shim.library import load_shim
from swapkit.ir.plans import Tier

COPIES = 1000
LEAST_BYTES, MOST_BYTES = 4 << 10, 512 << 10
WINDOW = 8  # copies that fit on the host during the disk measurement
WAYS = ("write", "read")
OTHERS = ("dd", "fio")

Figures = dict[str, Any]


class Device:
    """A block of memory that is the source and target of all copies, with its backend."""

    def __init__(self, nbytes: int) -> None:
        """Fill the memory with random bytes, which a disk cannot compress."""
        self._shim = load_shim()
        self.backend = Backend.cpu()
        self.drop_owner = self._shim.drop_address
        torch.manual_seed(0)
        self._storage = torch.randint(256, (nbytes,), dtype=torch.uint8).untyped_storage()

    def scheduler(
        self, *, host_limit_bytes: int | None = None, disk: Path | None = None
    ) -> Scheduler:
        """Open a scheduler over this device."""
        return Scheduler(
            self.backend,
            drop_owner=self.drop_owner,
            host_limit_bytes=host_limit_bytes,
            disk=disk,
        )

    def begin_out(self, group: Group, *, next_use: int) -> None:
        """Start a copy out."""
        self._start(group, group.copy_out, next_use)

    def begin_in(self, group: Group, *, next_use: int) -> None:
        """Start a copy back."""
        self._start(group, group.copy_in, next_use)

    def _start(self, group: Group, start: Start, next_use: int) -> None:
        start_copy(self._shim, group, start, self._storage, next_use=next_use, producer=0)


# ---- host memory ---------------------------------------------------------------------------------


def send(device: Device, group: Group) -> bool:
    """Copy a group out; return whether there was room."""
    try:
        device.begin_out(group, next_use=1)
        group.finish_out()
    except MemoryError:
        return False
    return True


def fill_host(device: Device, sizes: list[int], folder: Path | None) -> float:
    """Return the memory reserved for copies of these sizes over their total size."""
    scheduler = device.scheduler(disk=folder)
    groups = [Group(scheduler, nbytes, Tier.HOST) for nbytes in sizes]
    for group in groups:
        assert send(device, group)
    reserved_bytes = scheduler.stats().host_reserved_bytes
    return reserved_bytes / sum(sizes)


def fill_limited(device: Device, sizes: list[int], limit_bytes: int) -> Figures:
    """Copy more than fits, and check the limit after every copy."""
    scheduler = device.scheduler(host_limit_bytes=limit_bytes)
    groups = [Group(scheduler, nbytes, Tier.ANY) for nbytes in sizes]
    refused, most_bytes = 0, 0
    for index, group in enumerate(groups):
        refused += not send(device, group)
        most_bytes = max(most_bytes, scheduler.stats().host_reserved_bytes)
        if index % 3 == 0:  # free some copies, so that free memory is fragmented
            groups[index // 2] = Group(scheduler, sizes[index // 2], Tier.ANY)
    most_bytes = max(most_bytes, scheduler.stats().host_peak_bytes)
    return {
        "host_limit_bytes": limit_bytes,
        "host_limited_peak_bytes": most_bytes,
        "host_limited_refused": refused,
    }


def measure_host(folder: Path) -> Figures:
    chooser = random.Random(0)
    sizes = [chooser.randrange(LEAST_BYTES, MOST_BYTES) | 1 for _ in range(COPIES)]
    device = Device(MOST_BYTES)
    return {
        "host_copies": COPIES,
        "host_requested_bytes": sum(sizes),
        "host_ratio": fill_host(device, sizes, None),
        "host_ratio_with_disk": fill_host(device, sizes, folder),
        **fill_limited(device, sizes, sum(sizes) // 3),
    }


# ---- the disk ----------------------------------------------------------------------------------


class Contender:
    """A program that writes a number of bytes and reads them back, always in the same space."""

    def write(self) -> float:
        """Write; return the seconds."""
        raise NotImplementedError

    def read(self) -> float:
        """Read; return the seconds."""
        raise NotImplementedError


class Tiers(Contender):
    """The scheduler's disk tier."""

    def __init__(self, folder: Path, copies: int, copy_bytes: int) -> None:
        self._device = Device(copy_bytes)
        self._scheduler = self._device.scheduler(host_limit_bytes=WINDOW * copy_bytes, disk=folder)
        self._copies = copies
        self._copy_bytes = copy_bytes
        self._groups: list[Group] = []

    def write(self) -> float:
        self._groups = [
            Group(self._scheduler, self._copy_bytes, Tier.DISK) for _ in range(self._copies)
        ]
        before = self._scheduler.stats().written_bytes
        begin = time.perf_counter()
        for index, group in enumerate(self._groups):
            self._device.begin_out(group, next_use=self._copies - index)
        for group in self._groups:
            group.finish_out()
            group.evict()
        self._scheduler.drain()
        seconds = time.perf_counter() - begin
        assert self._scheduler.stats().written_bytes - before == self._copies * self._copy_bytes
        return seconds

    def read(self) -> float:
        before = self._scheduler.stats().read_bytes
        self._scheduler.trim()
        begin = time.perf_counter()
        backwards = self._groups[::-1]
        for index, group in enumerate(backwards):
            self._device.begin_in(group, next_use=index + 1)
        for group in backwards:
            group.finish_in()
        seconds = time.perf_counter() - begin
        done = self._scheduler.stats().read_bytes - before
        assert done == self._copies * self._copy_bytes
        self._groups.clear()
        return seconds


class Dd(Contender):
    """`dd` with direct I/O."""

    def __init__(self, folder: Path, copies: int, copy_bytes: int) -> None:
        self._file = folder / "dd"
        self._shape = [f"bs={copy_bytes}", f"count={copies}"]

    def write(self) -> float:
        return self._run("if=/dev/zero", f"of={self._file}", "oflag=direct", "conv=notrunc")

    def read(self) -> float:
        return self._run(f"if={self._file}", "of=/dev/null", "iflag=direct")

    def _run(self, *operands: str) -> float:
        begin = time.perf_counter()
        subprocess.run(["dd", *operands, *self._shape, "status=none"], check=True)
        return time.perf_counter() - begin


class Fio(Contender):
    """fio, with 16 requests of 4 MiB in flight."""

    def __init__(self, folder: Path, copies: int, copy_bytes: int) -> None:
        self._nbytes = copies * copy_bytes
        self._command = [
            "fio",
            "--name=tiers",
            f"--filename={folder / 'fio'}",
            f"--size={self._nbytes}",
            "--bs=4M",
            "--direct=1",
            "--ioengine=libaio",
            "--iodepth=16",
            "--output-format=json",
        ]

    def write(self) -> float:
        return self._run("write")

    def read(self) -> float:
        return self._run("read")

    def _run(self, way: str) -> float:
        command = [*self._command, f"--rw={way}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        (job,) = json.loads(done.stdout)["jobs"]
        return float(self._nbytes / job[way]["bw_bytes"])


def list_contenders(folder: Path, *, copies: int, copy_bytes: int) -> dict[str, Contender]:
    """Return the available contenders by name, swapkit first."""
    contenders: dict[str, Contender] = {
        "disk": Tiers(folder, copies, copy_bytes),
        "dd": Dd(folder, copies, copy_bytes),
    }
    if shutil.which("fio") is not None:
        contenders["fio"] = Fio(folder, copies, copy_bytes)
    return contenders


def measure_disk(folder: Path, options: argparse.Namespace) -> Figures:
    """Run all contenders in turns; the first round only creates the files."""
    contenders = list_contenders(folder, copies=options.copies, copy_bytes=options.copy_bytes)
    nbytes = options.copies * options.copy_bytes
    speeds: defaultdict[str, list[float]] = defaultdict(list)
    for index in range(options.rounds + 1):
        order = list(contenders.items())
        for name, contender in order if index % 2 == 0 else order[::-1]:
            seconds = {"write": contender.write(), "read": contender.read()}
            for way in WAYS if index > 0 else ():
                speeds[f"{name}_{way}"].append(nbytes / seconds[way])
    figures: Figures = {"disk_bytes": nbytes, "disk_copy_bytes": options.copy_bytes}
    for way in WAYS:
        figures[f"disk_{way}_bytes_per_s"] = statistics.median(speeds[f"disk_{way}"])
        for name in OTHERS:
            figures |= compare(name, way, speeds)
    return figures


def compare(name: str, way: str, speeds: dict[str, list[float]]) -> Figures:
    """Return another contender's median, and our median ratio to it; None: not installed."""
    theirs = speeds.get(f"{name}_{way}", [])
    ratios = [a / b for a, b in zip(speeds[f"disk_{way}"], theirs, strict=False)]
    return {
        f"{name}_{way}_bytes_per_s": statistics.median(theirs) if theirs else None,
        f"{way}_ratio_to_{name}": statistics.median(ratios) if ratios else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("host", "disk"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--copy-bytes", type=int, default=1 << 20)
    options = parser.parse_args()
    if options.part == "host":
        figures = measure_host(options.folder)
    else:
        figures = measure_disk(options.folder, options)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
