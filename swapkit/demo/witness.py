"""What the kernel says of a process's memory, asked from outside of it.

Linux only: `/proc/<pid>/smaps` lists every mapping with its resident bytes (`Rss`), and
`/proc/<pid>/status` the most that the whole process ever had resident (`VmHWM`).

The kernel writes `smaps` piece by piece. While the process runs, memory that it gives back in one
place and takes in another can be listed in both, and a mapping that grows can be listed twice: the
sum of such a list was never resident. So the process is stopped while it is looked at.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) [^\n]*\n(?:[A-Z]\w+:[^\n]*\n)*?Rss: +(\d+) kB$", re.MULTILINE
)
_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_KIB = 1024

AddressRange = tuple[int, int]
"""Address and number of bytes."""


def resident_bytes(smaps: bytes, ranges: Sequence[AddressRange]) -> int:
    """Sum the resident bytes of the mappings that lie in the given ranges.

    A mapping that reaches out of its range counts whole: the sum may be too high, never too low.

    Args:
        smaps: text of `/proc/<pid>/smaps`.
        ranges: where to look; need not be sorted.
    """
    total_kib = 0
    for match in _MAPPING.finditer(smaps):
        start, end = int(match[1], 16), int(match[2], 16)
        if any(start < address + nbytes and address < end for address, nbytes in ranges):
            total_kib += int(match[3])
    return total_kib * _KIB


def available() -> bool:
    """Whether the kernel tells."""
    return sys.platform == "linux" and Path("/proc/self/smaps").exists()


def process_peak_bytes(pid: int) -> int | None:
    """Most bytes that a process ever had resident; None where the kernel does not tell.

    Args:
        pid: of a process that still runs.
    """
    if not available():
        return None
    match = _HIGH_WATER.search(Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(match[1]) * _KIB if match else None


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a child process, with all its threads, from running.

    Args:
        pid: of a child of this process.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        # Returns once every thread has stopped, or the process has ended; takes no news away.
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class ResidentWitness:
    """Looks again and again at how many bytes of some address ranges are resident."""

    def __init__(self, pid: int) -> None:
        """Look at nothing yet.

        Args:
            pid: of the child process to look at.
        """
        self._pid = pid
        self._smaps = Path(f"/proc/{pid}/smaps")
        self._available = available()
        self.ranges: tuple[AddressRange, ...] = ()
        self.peak_bytes = 0
        self.looks = 0
        self.look_seconds = 0.0

    def look(self) -> None:
        """Look once, if there is anything to look at; `look_seconds` is how long it took."""
        if not self._available or not self.ranges:
            return
        start = time.perf_counter()
        try:
            with stopped(self._pid):
                smaps = self._smaps.read_bytes()
        except OSError:  # The process has just ended, or this kernel does not let us look.
            return
        self.look_seconds = time.perf_counter() - start
        self.looks += 1
        self.peak_bytes = max(self.peak_bytes, resident_bytes(smaps, self.ranges))
