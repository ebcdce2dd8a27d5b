"""A process's memory as the kernel reports it."""

from __future__ import annotations

import re
from pathlib import Path


def process_peak_bytes() -> int:
    """Return the peak resident bytes of this process (VmHWM) since it was last reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
