"""What a machine can do, measured once and remembered in the user's cache.

A machine is remembered under what its speeds depend on: the device, torch, the processor, the
threads that compute, how the link was opened, and the disk's folder. Budgets and limits are not its
own: they are filled in whenever it is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.machine.bandwidth import measure_disk, measure_speeds
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.shim.user_cache import alone, cache_folder
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit.errors import InvalidDocument
from swapkit.ir.codec import read_machine, write_machine
from swapkit.ir.machines import Machine
from swapkit.reporting.machines import summarize_machine

if TYPE_CHECKING:
    from swapkit._runtime.saved.device import Device
    from swapkit._runtime.saved.limits import Limits

_log = logging.getLogger(__name__)

# How long to wait for another process that measures the same machine.
PATIENCE_SECONDS = 20.0
PROCESSOR = Path("/proc/cpuinfo")
WAY = 2  # of measuring: part of every key, raised when what is measured changes


def measure_machine(device: Device, limits: Limits, *, fresh: bool = False) -> Machine:
    """Return the machine that a device is, from the cache if it has been measured before.

    Measuring takes about a second, in which the device computes and copies: between steps, or
    before the first. It takes a part of the memory that is free within the budget, 56 MiB at most,
    and never asks for a rescue. Processes that ask for the same machine at once measure it once.
    What other programs disturbed is not remembered.

    Args:
        device: over whose link sessions that begin now copy.
        limits: of the step that is planned.
        fresh: measure in any case, and remember that.

    Raises:
        OverBudget: there is no device memory to be had without a rescue.
        SwapkitError: a copy failed.
    """
    cached = None if fresh else _read(device, limits)
    if cached is not None:
        return cached
    folder = cache_folder()
    with alone(folder, f"machine-{_key(device, limits)}.lock", PATIENCE_SECONDS):
        cached = None if fresh else _read(device, limits)  # by another process meanwhile
        if cached is not None:
            return cached
        machine, is_steady = _measure(device, limits)
        remark = "" if is_steady else " (disturbed by other programs: not remembered)"
        _log.info("measured %s%s", summarize_machine(machine), remark)
        if folder is not None and is_steady:
            _write(folder / _file_name(device, limits), machine)
    return machine


def read_cached_machine(device: Device, limits: Limits) -> Machine | None:
    """Return the machine that a device is if it has been measured before, with these limits."""
    return _read(device, limits)


def _measure(device: Device, limits: Limits) -> tuple[Machine, bool]:
    """Return the machine, and whether it is worth remembering."""
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
    """Return the bytes that could be taken of a device without passing any limit."""
    limits = [limit for limit in (budget_bytes, device.budget_bytes) if limit]
    total_bytes = device.backend.memory_info().total_bytes
    return max(0, min([*limits, total_bytes]) - device.in_use_bytes())


def _limited(machine: Machine, limits: Limits) -> Machine:
    """Return a machine with the limits of a step."""
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
    folder = cache_folder()
    if folder is None:
        return None
    try:
        machine = read_machine(folder / _file_name(device, limits))
    except FileNotFoundError:
        return None
    except (OSError, InvalidDocument) as error:
        _log.info("a machine is measured again, since what is known of it is not: %s", error)
        return None
    return _limited(machine, limits)


def _write(file: Path, machine: Machine) -> None:
    try:
        write_machine(file, machine)
    except OSError as error:
        _log.info("what was measured could not be kept for the next time: %s", error)


def _key(device: Device, limits: Limits) -> str:
    """Return a digest of what the speeds of a machine depend on."""
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
    return torch.cuda.get_device_name(device.index)


def _processor() -> str:
    """Return the model of the processor, or what the system calls its kind."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in PROCESSOR.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _processor_count() -> int:
    return len(os.sched_getaffinity(0))
