"""Run a program with a torch for CUDA on the simulated device.

    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated script.py [argument...]
    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated -m module [argument...]
    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated -c code [argument...]

It builds what is missing, starts the interpreter that SWAPKIT_CUDA_PYTHON names with the simulated
runtime loaded before torch looks for the real one, takes over the operators and runs the program.
The variables in `driver/cusim.h` say how the device is made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.simulated.launching import ROOT, Machine, main, make, prepend, version_of

if TYPE_CHECKING:
    from pathlib import Path

BUILD = ROOT / "build" / "cuda"
DRIVER = BUILD / "plain"
PYTHON = "SWAPKIT_CUDA_PYTHON"
INSIDE = "SWAPKIT_CUDA_SIMULATED"


def build_driver() -> Path:
    """Build the driver; return its file."""
    make(BUILD, "tests/cuda")
    return DRIVER / "libcuda.so.1"


def build(*targets: str) -> Path:
    """Build the driver, the runtime and the operators; return the folder of the last two."""
    build_driver()
    make(BUILD, "tests/cuda/runtime", *targets)
    return BUILD / version_of("torch", os.environ[PYTHON])


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which torch meets the simulation."""
    runtime = next(folder.glob("libcudart.so.*"))
    return {
        "LD_PRELOAD": prepend("LD_PRELOAD", runtime, separator=" "),
        "LD_LIBRARY_PATH": prepend("LD_LIBRARY_PATH", DRIVER, folder),
    }


def install() -> int:
    """Take over the operators."""
    from tests.cuda import operators

    return operators.install()


MACHINE = Machine(
    module="tests.cuda.simulated",
    wheel="a torch for CUDA",
    python=PYTHON,
    inside=INSIDE,
    prepare=lambda: environment(build()),
    install=install,
)

if __name__ == "__main__":
    main(MACHINE, __doc__)
