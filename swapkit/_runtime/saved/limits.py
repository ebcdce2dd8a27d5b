"""The limits of a session, or of one planned step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory and the disk space that training may use.

    Args:
        budget_bytes: the most bytes reserved on the device; 0: no limit.
        host_bytes: the most bytes of copies on the host; None: all of the host's memory.
        disk: the folder for copies that the host has no room for; None: no disk.
        disk_bytes: the most bytes of copies on the disk; 0: all of the file system.
    """

    budget_bytes: int = 0
    host_bytes: int | None = None
    disk: Path | None = None
    disk_bytes: int = 0
