"""Programs on the virtual GPU: the interpreter they need, the machine they get."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.context import ROOT
from benchmarks.gpu.process import last_line, run_process
from swapkit.planning.hardware import HARDWARE

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = "SWAPKIT_CUDA_PYTHON"
HOW = (
    "make one with `python3 -m venv FOLDER` and `FOLDER/bin/pip install torch==2.13.0 cffi "
    f"highspy numpy pyyaml wrapt` (PyPI's is built for CUDA 13), and set {PYTHON}=FOLDER/bin/python"
)
LOOK = "import torch; print(torch.version.cuda or '')"
WARM_UP = "import swapkit; swapkit.install(device='cuda')"
# Of tests/cuda/driver/rates.c, by what the planner calls them.
MACHINES = {"H100": "H100", "H200": "H200", "RTX4090": "RTX 4090"}
SLOWNESS = 2.2  # of the host of the H100 that was measured, beside this one's kind
BUILD_SECONDS = 600.0


class NotPreparedError(Exception):
    """Something that is needed is missing; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU, and how much longer its host takes than this one at a quiet moment; 0: no time."""

    name: str
    slowness: float = SLOWNESS

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make it."""
        return {
            "CUSIM_MACHINE": self.name,
            "CUSIM_HOST_SLOWNESS": str(self.slowness),
            "OMP_NUM_THREADS": "1",  # the clock is that of all threads of a process
            "TORCH_DISABLE_NATIVE_JIT": "1",  # torch's kernels in Triton, which there is none for
        }

    @property
    def card_bytes(self) -> int:
        """What `swapkit.budget("auto")` takes of its memory."""
        there = HARDWARE[MACHINES[self.name]].machine
        assert there is not None
        return there.budget_bytes

    def with_memory(self, nbytes: int) -> dict[str, str]:
        """Return the variables that make it with so much memory; 0: with its own."""
        return self.environment | ({"CUSIM_CAPACITY": str(nbytes)} if nbytes else {})


def command(*program: str | Path) -> list[str]:
    """Return what runs a program of Python, such as `-m module`, on the virtual GPU."""
    return [sys.executable, "-m", "tests.cuda.timed", *map(str, program)]


def check_interpreter() -> None:
    """See that there is an interpreter with a torch for CUDA.

    Raises:
        NotPreparedError: there is none.
    """
    interpreter = os.environ.get(PYTHON)
    if not interpreter:
        raise NotPreparedError(f"{PYTHON} does not name an interpreter with torch for CUDA: {HOW}")
    try:
        done = subprocess.run(
            [interpreter, "-c", LOOK], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NotPreparedError(f"{PYTHON}={interpreter} does not run ({error}): {HOW}") from None
    if not done.stdout.strip():
        raise NotPreparedError(f"{PYTHON}={interpreter} has no torch for CUDA: {HOW}")


def prepare(machine: Machine, log: Path) -> None:
    """Build the virtual GPU and swapkit's shim once, so that processes at once need not.

    Raises:
        NotPreparedError: that is not possible.
    """
    log.unlink(missing_ok=True)
    done = run_process(
        command("-c", WARM_UP),
        seconds=BUILD_SECONDS,
        log=log,
        cwd=ROOT,
        environment=machine.environment,
    )
    if not done.ok:
        raise NotPreparedError(f"the virtual GPU does not start: {last_line(log)} (see {log})")
