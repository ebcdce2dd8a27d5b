"""What budgets and limits are shares of: memory of the host, of a device, of the process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.model.ranks import count_node_ranks
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument
from swapkit.planning.hardware import DEVICE_RESERVE_BYTES, DEVICE_RESERVE_SHARE
from swapkit.texts import get_logger
from swapkit.units import MIB, format_bytes, parse_bytes, show

# ---- host memory ---------------------------------------------------------------------------------
#
# The host memory that this process can still get, by the kernel and by its control groups.

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_KIB = 1024


def host_available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the bytes that programs can get without swapping pages to a disk.

    Pages of files that the kernel would drop count as available, also in a control group.

    Args:
        proc: the folder of the kernel's files.
        groups: the folder of the control groups.

    Raises:
        OSError: the kernel's files cannot be read.
    """
    rooms = [_read_table(proc / "meminfo")["MemAvailable"] * _KIB]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines():
            rooms += _rooms_of(line, groups)
    return min(rooms)


def _rooms_of(line: str, groups: Path) -> list[int]:
    """Return the bytes left in the group of a line of /proc/self/cgroup, and in its parents.

    "0::/path" is a group of version 2, "4:memory:/path" one of version 1.
    """
    number, controllers, path = line.split(":", 2)
    if number == "0" and not controllers:
        top, limit, usage, files = groups, "memory.max", "memory.current", "inactive_file"
    elif controllers == "memory":
        top, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        files = "total_inactive_file"
    else:
        return []
    rooms = []
    group = top / path.lstrip("/")
    for each in (group, *group.parents):
        most_bytes, used_bytes = _read_number(each / limit), _read_number(each / usage)
        if most_bytes is not None and used_bytes is not None:
            with contextlib.suppress(OSError):
                used_bytes -= _read_table(each / "memory.stat").get(files, 0)
            rooms.append(max(0, most_bytes - used_bytes))
        if each == top:
            break
    return rooms


def _read_number(file: Path) -> int | None:
    """Return the number in a file; None: there is none, as in "max"."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_table(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    rows = (
        line.replace(":", " ").split() for line in file.read_text(encoding="ascii").splitlines()
    )
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


# ---- free memory ---------------------------------------------------------------------------------
#
# `budget("auto")`: the memory that is free on a device now, less a reserve.
#
# What the pool has reserved counts as free: a session may use it. Of a device that several
# processes of this machine share, each gets an equal part of what is free.

AUTO = "auto"
# Left to other programs, and to this one's memory outside of the pool. Host copies take more.
HOST_RESERVE_SHARE, HOST_RESERVE_BYTES = 0.10, 256 * MIB

_log = get_logger("memory")


def find_free_limit(installation: Installation[Any]) -> int:
    """Return the bytes that a session may reserve on a device now, and log how they came about.

    Raises:
        InvalidArgument: less is free than the reserve.
    """
    name = installation.device.name
    if name == CPU:
        free_bytes, total_bytes = host_available_bytes(), installation.total_bytes
        reserve_bytes = max(HOST_RESERVE_BYTES, int(HOST_RESERVE_SHARE * total_bytes))
    else:
        memory = installation.device.backend.memory_info()
        free_bytes = memory.free_bytes
        reserve_bytes = max(DEVICE_RESERVE_BYTES, int(DEVICE_RESERVE_SHARE * memory.total_bytes))
    pool_bytes: int = installation.pool.stats()["reserved_bytes.all.current"]
    if name == CPU:
        processes = count_node_ranks()
    else:
        processes = _count_processes(ACCELERATORS[name.type].count())
    limit_bytes = pool_bytes + (free_bytes - reserve_bytes) // processes
    made = (
        f"{format_bytes(free_bytes)} free on {name}, less a reserve of "
        f"{format_bytes(reserve_bytes)}"
        f"{f', shared by {processes} processes' if processes > 1 else ''}, and "
        f"{format_bytes(pool_bytes)} that this process has reserved"
    )
    if limit_bytes <= 0:
        raise InvalidArgument(
            f"limit='auto': nothing is left ({made}). Free memory, or name the bytes yourself, "
            "e.g. '2GiB'"
        )
    _log.info("budget 'auto': %s = %s", format_bytes(limit_bytes), made)
    return limit_bytes


def _count_processes(devices: int) -> int:
    """Return how many processes of this machine share each of its devices."""
    return math.ceil(read_environment().local_processes / max(1, devices))


# ---- process limit -------------------------------------------------------------------------------
#
# The limit of a device's pool for the whole process, as the user states it.

Amount = int | float | str
ANY_BYTES = 1 << 40  # assumed device memory while a limit is only validated


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimit:
    """The most bytes that a pool may reserve, and those that it leaves to other code.

    Args:
        limit: bytes, text or a share of the device's memory. None: the pool's usual limit.
        reserve: likewise. None: nothing is left.
    """

    limit: Amount | None = None
    reserve: Amount | None = None

    def check(self) -> None:
        """Check what can be checked before the device is known.

        Raises:
            InvalidArgument: an amount is invalid.
        """
        if self.limit is not None:
            parse_bytes(self.limit, whole_bytes=ANY_BYTES, name="limit")
        if self.reserve is not None:
            parse_bytes(self.reserve, whole_bytes=ANY_BYTES, name="reserve", least=0)

    def resolve(self, find_total: Callable[[], int], usual_bytes: int) -> int:
        """Return the limit in bytes; 0: none.

        Args:
            find_total: returns the device's memory in bytes, or this process's part of it; called
                only if it matters.
            usual_bytes: the limit if none is stated; 0: none.

        Raises:
            InvalidArgument: an amount is invalid, or nothing is left for the pool.
        """
        limit_bytes = usual_bytes
        if self.limit is not None:
            limit_bytes = parse_bytes(self.limit, whole_bytes=find_total, name="limit")
        if not self.reserve:
            return limit_bytes
        total_bytes = find_total()
        left = total_bytes - parse_bytes(
            self.reserve, whole_bytes=total_bytes, name="reserve", least=0
        )
        if left <= 0:
            raise InvalidArgument(
                f"reserve={show(self.reserve)}: expected less than the device's memory of "
                f"{total_bytes} bytes"
            )
        return min(limit_bytes or left, left)
