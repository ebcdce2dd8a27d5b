"""Training steps on command, with their memory: `_address_training.py PROGRAM EXTENT WAY [BYTES]`.

WAY is "glibc" (torch's own allocator), or swapkit's pool in a session with a budget of so many
bytes: "planned" or "unplanned"; without a budget: "pool". Each line on stdin is one step to train;
the answer on stdout is one line of JSON. At the end of stdin the digest follows.

`peak_bytes` of glibc is the growth of the process's resident memory, as the kernel reports it
(VmHWM), beyond that of a process that has trained a tiny program of the kind before.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks._address_programs import make_program
from benchmarks._process_memory import process_peak_bytes

if TYPE_CHECKING:
    from benchmarks._address_programs import Program
    from examples.language_model import Training
    from swapkit._native.layout import LayoutStats

SCHEDULED = Path("/proc/thread-self/schedstat")

Figures = dict[str, Any]


class Memory(Protocol):
    """What serves the memory."""

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> Figures:
        """Return the figures of the step."""


class Glibc:
    """The memory of the process."""

    def __init__(self, name: str) -> None:
        program = make_program(name, "quick")  # loads kernels, and fills their buffers
        for _ in range(2):
            program.step()
        del program
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.begin()
        self._base_bytes = process_peak_bytes()

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak

    def end(self) -> Figures:
        return {"peak_bytes": process_peak_bytes() - self._base_bytes}


class InPool:
    """The memory of swapkit's pool."""

    def __init__(self, *, is_planned: bool) -> None:
        import swapkit
        from swapkit._runtime.allocators.installation import require_installation

        swapkit.install(device="cpu")
        self._installation = require_installation()
        if not is_planned:  # as for a pool without virtual memory
            self._installation.layout = None
        self._stack = ExitStack()
        self._session: Any = None
        self._maps, self._layout = 0, self._layout_stats()

    def enter(self, program: Program | Training, limit_bytes: int) -> None:
        """Train the program within a budget from now on."""
        import swapkit

        self._session = swapkit.budget(limit_bytes, program.model, program.optimizer)
        self._stack.enter_context(self._session)

    def close(self) -> None:
        self._stack.close()

    def begin(self) -> None:
        self._installation.pool.reset_peak()
        self._maps = self._installation.pool.stats()["maps"]
        self._layout = self._layout_stats()

    def end(self) -> Figures:
        stats, before, after = self._installation.pool.stats(), self._layout, self._layout_stats()
        figures = {
            "peak_bytes": stats["reserved_bytes.all.peak"],
            "requested_bytes": stats["requested_bytes.all.peak"],
            "maps": stats["maps"] - self._maps,
            "stage": self._session.stage if self._session is not None else "",
            "layout_bytes": 0,
        }
        if before is not None and after is not None and before.height_bytes:
            figures |= {
                "layout_bytes": after.height_bytes,
                "hit_bytes": max(0, after.planned_bytes - before.planned_bytes),
                "served_bytes": max(0, after.served_bytes - before.served_bytes),
            }
        return figures

    def _layout_stats(self) -> LayoutStats | None:
        layout = self._installation.layout
        return None if layout is None else layout.stats()


def seconds_without_processor() -> float:
    """Return how long this thread was runnable but not running; 0: the kernel has no figure."""
    try:
        return int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def main() -> None:
    name, extent, way, *limit = sys.argv[1:]
    torch.set_num_threads(1)
    memory = Glibc(name) if way == "glibc" else InPool(is_planned=way == "planned")
    program = make_program(name, extent)
    if limit:
        assert isinstance(memory, InPool)
        memory.enter(program, int(limit[0]))
    for _ in sys.stdin:
        memory.begin()
        begun, waited = time.perf_counter(), seconds_without_processor()
        program.step()
        seconds = time.perf_counter() - begun
        figures = {"seconds": seconds - (seconds_without_processor() - waited)}
        sys.stdout.write(json.dumps(figures | memory.end()) + "\n")
        sys.stdout.flush()
    if isinstance(memory, InPool):
        memory.close()
    sys.stdout.write(json.dumps({"digest": program.digest()}) + "\n")


if __name__ == "__main__":
    main()
