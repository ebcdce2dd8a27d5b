"""Running ways to train on one virtual GPU, some at once, each in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.comparison import Results, figures_of
from benchmarks.gpu.context import ROOT
from benchmarks.gpu.process import run_process
from benchmarks.virtual import launch
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.comparison import Figures, Way
    from benchmarks.gpu.configurations import Setup
    from benchmarks.virtual.launch import Machine

WAY_SECONDS = 900.0  # that a process gets before it is taken to hang
MEMORY_SHARE = 0.5  # of this machine's, for all processes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Where processes run, how many of them at once, and with how much of this machine."""

    machine: Machine
    folder: Path
    jobs: int
    most_bytes: int  # resident, of one process: the virtual GPU's memory is never touched

    def run(self, ways: list[Way], show: Callable[[str, Results], None]) -> Results:
        """Run ways as soon as what their limits follow from is known; show each that ended."""
        results = Results()
        waiting = list(ways)
        running: dict[Future[Figures], str] = {}
        ended = threading.Event()  # when this one is interrupted, the processes end, too
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while waiting or running:
                    self._start(pool, ended, results, waiting, running)
                    if not running:
                        break  # what the others' limits follow from has failed
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        name = running.pop(future)
                        results.add(name, future.result())
                        show(name, results)
            finally:
                ended.set()
        return results

    def _start(
        self,
        pool: ThreadPoolExecutor,
        ended: threading.Event,
        results: Results,
        waiting: list[Way],
        running: dict[Future[Figures], str],
    ) -> None:
        """Start what can run now, as many as may."""
        for way in list(waiting):
            setup = way.setup(results) if len(running) < self.jobs else None
            if setup is not None:
                waiting.remove(way)
                running[pool.submit(self._run_way, way.name, setup, ended)] = way.name

    def _run_way(self, name: str, setup: Setup, ended: threading.Event) -> Figures:
        result, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        for path in (result, log):
            path.unlink(missing_ok=True)

        def watch(process: int) -> str:
            if ended.is_set():
                return "interrupted"
            taken = resident_bytes(process)
            if taken <= self.most_bytes:
                return ""
            return f"it took {format_bytes(taken)} of this machine's memory"

        begin = time.monotonic()
        done = run_process(
            launch.command("-m", "benchmarks.virtual.trainer", setup.dump(), result),
            seconds=WAY_SECONDS,
            log=log,
            cwd=ROOT,
            environment=self.machine.with_memory(setup.memory_bytes),
            watch=watch,
        )
        return figures_of(result, done) | {"seconds": time.monotonic() - begin}


def resident_bytes(process: int) -> int:
    """Return how much memory a process has in use; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def share_of_memory(jobs: int) -> int:
    """Return how much memory each of so many processes may take."""
    whole_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(whole_bytes * MEMORY_SHARE / jobs)
