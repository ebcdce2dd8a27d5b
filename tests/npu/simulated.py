"""Run a program with the real torch_npu on the simulated device.

    SWAPKIT_NPU_PYTHON=... python -m tests.npu.simulated script.py [argument...]
    SWAPKIT_NPU_PYTHON=... python -m tests.npu.simulated -m module [argument...]
    SWAPKIT_NPU_PYTHON=... python -m tests.npu.simulated -c code [argument...]

It builds what is missing, starts the interpreter that SWAPKIT_NPU_PYTHON names where torch_npu
finds the simulated libraries instead of CANN's, takes over the operators and runs the program.
The variables in `tests/cuda/driver/settings.h` say how the device is made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.simulated.launching import ROOT, Machine, main, make, prepend, version_of

if TYPE_CHECKING:
    from pathlib import Path

BUILD = ROOT / "build" / "npu"
RUNTIME = BUILD / "plain"
PYTHON = "SWAPKIT_NPU_PYTHON"
INSIDE = "SWAPKIT_NPU_SIMULATED"


def build_runtime() -> Path:
    """Build the runtime; return its file."""
    make(BUILD, "tests/npu")
    return RUNTIME / "libascendcl.so"


def build() -> Path:
    """Build the runtime, the operators and the rest; return the folder of the last two."""
    build_runtime()
    make(BUILD, "tests/npu/kernels")
    return BUILD / version_of("torch_npu", os.environ[PYTHON])


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which torch_npu meets the simulation."""
    return {
        "LD_LIBRARY_PATH": prepend("LD_LIBRARY_PATH", RUNTIME, folder),
        # As CANN's own script sets them: torch_npu asks whether they name folders.
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder),
        # `import torch` loads torch_npu, as where it is installed: here it finds its libraries.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        # Sums of several threads could depend on how busy the machine is, and tests compare bits.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def install() -> int:
    """Take over the operators."""
    from tests.npu import operators

    return operators.install()


MACHINE = Machine(
    module="tests.npu.simulated",
    wheel="torch_npu",
    python=PYTHON,
    inside=INSIDE,
    prepare=lambda: environment(build()),
    install=install,
)

if __name__ == "__main__":
    main(MACHINE, __doc__)
