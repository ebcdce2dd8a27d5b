"""A process's memory as the kernel reports it, read from another process.

Linux only: `/proc/<pid>/smaps` lists every mapping with its resident bytes (`Rss`), and
`/proc/<pid>/status` the peak resident memory of the whole process (`VmHWM`).

The kernel writes `smaps` piece by piece. While the process runs, memory that it frees in one place
and allocates in another can appear in both, and a growing mapping can appear twice: their sum was
never resident. So the process is stopped while `smaps` is read.
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
    """Return the total resident bytes of the mappings that overlap the given ranges.

    A mapping that extends beyond a range counts whole: the sum may be too high, never too low.

    Args:
        smaps: text of `/proc/<pid>/smaps`.
        ranges: address ranges, in any order.
    """
    total_kib = 0
    for match in _MAPPING.finditer(smaps):
        start, end = int(match[1], 16), int(match[2], 16)
        if any(start < address + nbytes and address < end for address, nbytes in ranges):
            total_kib += int(match[3])
    return total_kib * _KIB


def available() -> bool:
    """Return whether the kernel provides `smaps`."""
    return sys.platform == "linux" and Path("/proc/self/smaps").exists()


def process_peak_bytes(pid: int) -> int | None:
    """Return the peak resident bytes of a process; None: the kernel does not report it.

    Args:
        pid: id of a running process.
    """
    if not available():
        return None
    match = _HIGH_WATER.search(Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(match[1]) * _KIB if match else None


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a child process, with all its threads, inside the block.

    Args:
        pid: id of a child of this process.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        # Returns when every thread has stopped or the process has ended; WNOWAIT does not reap it.
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class ResidentWitness:
    """Repeated measurement of the resident bytes of address ranges."""

    def __init__(self, pid: int) -> None:
        """Start without ranges.

        Args:
            pid: id of the child process to measure.
        """
        self._pid = pid
        self._smaps = Path(f"/proc/{pid}/smaps")
        self._available = available()
        self.ranges: tuple[AddressRange, ...] = ()
        self.peak_bytes = 0
        self.looks = 0
        self.look_seconds = 0.0

    def look(self) -> None:
        """Measure once, if there are ranges; store the duration in `look_seconds`."""
        if not self._available or not self.ranges:
            return
        start = time.perf_counter()
        try:
            with stopped(self._pid):
                smaps = self._smaps.read_bytes()
        except OSError:  # the process has just ended, or this kernel denies access
            return
        self.look_seconds = time.perf_counter() - start
        self.looks += 1
        self.peak_bytes = max(self.peak_bytes, resident_bytes(smaps, self.ranges))
