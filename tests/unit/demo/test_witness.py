"""The witness sums what the kernel says of the right mappings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swapkit.demo.witness import ResidentWitness, process_peak_bytes, resident_bytes, stopped

if TYPE_CHECKING:
    from collections.abc import Iterator

# Recorded from a kernel 6.18: a library, two neighbouring parts of one reserved range, the stack.
SMAPS = b"""\
5581d8a6a000-5581d8cf0000 r-xp 0006a000 fe:00 1443                       /usr/bin/python3.11
Size:               2584 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                2112 kB
Pss:                1056 kB
Shared_Clean:       2112 kB
AnonHugePages:         0 kB
THPeligible:           0
VmFlags: rd ex mr mw me
7f2a40000000-7f2a48000000 rw-p 00000000 00:00 0
Size:             131072 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:               98304 kB
Pss:               98304 kB
Pss_Dirty:         98304 kB
Shared_Clean:          0 kB
Anonymous:         98304 kB
AnonHugePages:     98304 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac sd hg
7f2a48000000-7f2a80000000 ---p 00000000 00:00 0
Size:             917504 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                   8 kB
Pss:                   8 kB
THPeligible:           0
VmFlags: mr mw me nr sd
7ffc11b5e000-7ffc11b7f000 rw-p 00000000 00:00 0                          [stack]
Size:                132 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                  60 kB
Pss:                  60 kB
THPeligible:           0
VmFlags: rd wr mr mw me gd ac
"""
POOL = (0x7F2A40000000, 1 << 30)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.mark.parametrize(
    ("ranges", "expected_kib"),
    [
        ((), 0),
        ((POOL,), 98304 + 8),
        (((0x7F2A40000000, 0x8000000),), 98304),
        (((0x7F2A48000000, 0x1000), (0x5581D8A6A000, 0x1000)), 8 + 2112),
        (((0x7F2A80000000, 1 << 30),), 0),
        (((0x7FFC11B5D000, 0x1001),), 60),
    ],
)
def test_sum_when_ranges_are_given_then_only_their_mappings(
    ranges: tuple[tuple[int, int], ...], expected_kib: int
) -> None:
    assert resident_bytes(SMAPS, ranges) == expected_kib * 1024


OBEDIENT = """
import ctypes, mmap, sys
page, inner = mmap.PAGESIZE, (8 << 20)
mapping = mmap.mmap(-1, inner + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
# Between two unreadable pages, so that the kernel cannot join it to a neighbour.
for guard in (address, address + page + inner):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
print(address + page, inner, flush=True)
for line in sys.stdin:
    if line == "fill\\n":
        ctypes.memset(address + page, 1, 3 << 20)
    else:
        mapping.madvise(mmap.MADV_DONTNEED, page, inner)
    print("done", flush=True)
"""


@pytest.fixture
def obedient() -> Iterator[subprocess.Popen[str]]:
    """A process that fills and empties a mapping of its own when told to."""
    with subprocess.Popen(
        [sys.executable, "-c", OBEDIENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield process
        process.kill()


def tell(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if what:
        process.stdin.write(what + "\n")
    return process.stdout.readline()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


@LINUX
def test_look_when_pages_come_and_go_then_the_peak_stays(obedient: subprocess.Popen[str]) -> None:
    address, nbytes = map(int, tell(obedient, "").split())
    looker = ResidentWitness(obedient.pid)
    looker.look()
    assert looker.looks == 0
    looker.ranges = ((address, nbytes),)
    looker.look()
    assert looker.peak_bytes == 0
    tell(obedient, "fill")
    looker.look()
    peak_bytes = looker.peak_bytes
    assert 3 << 20 <= peak_bytes <= nbytes
    tell(obedient, "empty")
    looker.look()
    assert looker.peak_bytes == peak_bytes
    assert looker.looks == 3
    assert looker.look_seconds > 0


@LINUX
def test_process_when_looked_at_then_stopped_and_goes_on(obedient: subprocess.Popen[str]) -> None:
    tell(obedient, "")
    with stopped(obedient.pid):
        assert state_of(obedient.pid) == "T"
    assert tell(obedient, "fill") == "done\n"
    assert state_of(obedient.pid) != "T"


@LINUX
def test_process_peak_when_asked_then_that_of_the_kernel() -> None:
    peak_bytes = process_peak_bytes(os.getpid())
    assert peak_bytes is not None
    ballast = bytearray(peak_bytes)
    grown_bytes = process_peak_bytes(os.getpid())
    assert grown_bytes is not None
    assert grown_bytes > peak_bytes
    assert len(ballast) == peak_bytes


def test_witness_when_the_kernel_does_not_tell_then_sees_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    looker = ResidentWitness(os.getpid())
    looker.ranges = (POOL,)
    looker.look()
    assert looker.looks == 0
    assert process_peak_bytes(os.getpid()) is None


@LINUX
def test_look_when_the_process_is_gone_then_nothing_happens(
    obedient: subprocess.Popen[str],
) -> None:
    looker = ResidentWitness(obedient.pid)
    looker.ranges = (POOL,)
    obedient.kill()
    looker.look()
    obedient.wait()
    looker.look()
    assert looker.peak_bytes == 0
