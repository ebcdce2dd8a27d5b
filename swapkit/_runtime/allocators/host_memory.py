"""The host memory that this process can still get, by the kernel and by its control groups."""

from __future__ import annotations

import contextlib
from pathlib import Path

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
