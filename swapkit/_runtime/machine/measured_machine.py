"""The machine model, measured once and stored in the user's cache.

The cache key holds everything the speeds depend on: the device, torch, the processor, the number of
compute threads, the link's settings, and the disk's folder. Budgets and limits are not cached: they
are filled in at each request.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from swapkit._runtime.machine.bandwidth import measure_disk, measure_speeds
from swapkit._runtime.saved.device import CPU, Device, Limits
from swapkit._runtime.shim.build import (
    FILE_MODE,
    alone,
    cache_folder,
    find_cached,
    name_of,
    open_own,
)
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit.errors import InvalidDocument
from swapkit.ir.codec import read_machine, write_machine
from swapkit.ir.machines import Machine
from swapkit.reporting.machines import summarize_machine
from swapkit.texts import get_logger

_log = get_logger("machine")

# Maximum wait for another process that measures the same machine.
PATIENCE_SECONDS = 20.0
PROCESSOR = Path("/proc/cpuinfo")
WAY = 2  # version of the method: part of every key, raised when the measurement changes


def measure_machine(device: Device, limits: Limits, *, fresh: bool = False) -> Machine:
    """Return the machine model of a device, from the cache if it was measured before.

    Call this between steps or before the first: a measurement keeps the device busy for about a
    second. It takes part of the memory that is free within the budget, at most 56 MiB, and never
    starts a rescue. Several processes that request the same machine at once measure it once.
    A measurement disturbed by other programs is not cached.

    Args:
        device: the device; new sessions copy over its link.
        limits: of the planned step.
        fresh: ignore the cache, measure, and cache the result.

    Raises:
        OverBudget: no device memory is free without a rescue.
        SwapkitError: a copy failed.
    """
    cached = None if fresh else _read(device, limits)
    if cached is not None:
        return cached
    folder = cache_folder()
    with alone(folder, f"machine-{_key(device, limits)}.lock", PATIENCE_SECONDS):
        cached = None if fresh else _read(device, limits)  # written by another process meanwhile
        if cached is not None:
            return cached
        machine, is_steady = _measure(device, limits)
        remark = "" if is_steady else " (disturbed by other programs, not cached)"
        _log.info("measured %s%s", summarize_machine(machine), remark)
        if folder is not None and is_steady:
            _write(folder / _file_name(device, limits), machine)
    return machine


def _measure(device: Device, limits: Limits) -> tuple[Machine, bool]:
    """Return the machine, and whether to cache it."""
    room_bytes = _room_bytes(device, limits.budget_bytes)
    with hidden(), torch.no_grad():
        speeds = measure_speeds(device, room_bytes=room_bytes, host_bytes=limits.host_bytes)
        disk_speeds = 0.0, 0.0
        if limits.disk is not None:
            disk_speeds = measure_disk(
                device, limits.disk, room_bytes=room_bytes, disk_bytes=_disk_bytes(limits)
            )
    machine = Machine(
        budget_bytes=limits.budget_bytes,
        out_bytes_per_second=speeds.out_bytes_per_second,
        in_bytes_per_second=speeds.in_bytes_per_second,
        out_latency_seconds=speeds.out_latency_seconds,
        in_latency_seconds=speeds.in_latency_seconds,
        duplex=speeds.duplex,
        interference=speeds.interference,
        disk_write_bytes_per_second=disk_speeds[0],
        disk_read_bytes_per_second=disk_speeds[1],
        name=_name(device),
    )
    return _limited(machine, limits), speeds.is_steady


def _room_bytes(device: Device, budget_bytes: int) -> int:
    """Return the free device memory in bytes within all limits."""
    limits = [limit for limit in (budget_bytes, device.budget_bytes) if limit]
    total_bytes = device.backend.memory_info().total_bytes
    return max(0, min([*limits, total_bytes]) - device.in_use_bytes())


def _limited(machine: Machine, limits: Limits) -> Machine:
    """Return the machine with the limits of a step."""
    return replace(
        machine,
        budget_bytes=limits.budget_bytes,
        host_bytes=limits.host_bytes,
        disk_bytes=_disk_bytes(limits),
    )


def _disk_bytes(limits: Limits) -> int:
    if limits.disk is None:
        return 0
    return limits.disk_bytes or shutil.disk_usage(limits.disk).free


# ---- the cache -----------------------------------------------------------------------------------


def _read(device: Device, limits: Limits) -> Machine | None:
    file = find_cached(_file_name(device, limits))
    if file is None:
        return None
    try:
        descriptor = open_own(file)
        try:
            machine = read_machine(name_of(descriptor))
        finally:
            os.close(descriptor)
    except (OSError, InvalidDocument) as error:
        _log.info("measuring the machine again, since the cached result cannot be read: %s", error)
        return None
    return _limited(machine, limits)


def _write(file: Path, machine: Machine) -> None:
    try:
        write_machine(file, machine)
        file.chmod(FILE_MODE)
    except OSError as error:
        _log.info("cannot cache the measurement: %s", error)


def _key(device: Device, limits: Limits) -> str:
    """Return a digest of everything that a machine's speeds depend on."""
    disk = "none" if limits.disk is None else str(limits.disk.resolve())
    parts = {
        "way": WAY,
        "device": f"{device.name} {_name(device)}",
        "torch": torch.__version__,
        "processor": f"{_processor()} x{_processor_count()}",
        "threads": torch.get_num_threads(),
        "link": f"{device.link.name} {device.link.settings}",
        "disk": disk,
    }
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _file_name(device: Device, limits: Limits) -> str:
    return f"machine-{_key(device, limits)}.json"


def _name(device: Device) -> str:
    if device.name == CPU:
        return f"{_processor()}, {torch.get_num_threads()} threads"
    return ACCELERATORS[device.name.type].name_of(device.index)


def _processor() -> str:
    """Return the model of the processor, or else the system's name of its kind."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in PROCESSOR.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _processor_count() -> int:
    return len(os.sched_getaffinity(0))
