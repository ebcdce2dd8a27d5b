"""Run a program with a torch for CUDA on the virtual GPU: nothing is computed, all takes time.

    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.timed program.py [argument...]
    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.timed -m module [argument...]
    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.timed -c code [argument...]

CUSIM_MACHINE=H100, H200 or RTX4090 says which GPU it is; `driver/settings.h` has all variables, and
`driver/rates.c` the machines.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path

from tests.cuda import simulated
from tests.cuda.timed.machine import install
from tests.simulated.launching import main

INSIDE = "SWAPKIT_CUDA_TIMED"
PROCESSOR = Path("/proc/cpuinfo")


def quiet_file() -> Path:
    """Return where is remembered what this kind of processor does at a quiet moment."""
    text = PROCESSOR.read_text() if PROCESSOR.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    model = found[1] if found else platform.machine()
    return simulated.BUILD / f"quiet-{re.sub('[^A-Za-z0-9]+', '-', model).strip('-')}"


def environment() -> dict[str, str]:
    """Build what is missing; return the variables with which torch meets the virtual GPU."""
    folder = simulated.build("timed")
    libraries = sorted(str(file) for file in (folder / "timed").glob("*.so.*"))
    changed = simulated.environment(folder)
    return {
        **changed,
        "CUSIM_HOST_QUIET_FILE": os.environ.get("CUSIM_HOST_QUIET_FILE", str(quiet_file())),
        "LD_PRELOAD": " ".join([changed["LD_PRELOAD"], *libraries]),
        "CUSIM_TIMED": "1",
        simulated.INSIDE: "1",
    }


def prepare() -> dict[str, str]:
    """Should a program fill the host after all, it is the one to be ended."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    return environment()


MACHINE = simulated.MACHINE._replace(
    module="tests.cuda.timed", inside=INSIDE, prepare=prepare, install=install
)

if __name__ == "__main__":
    main(MACHINE, __doc__)
