"""Run a program with a torch for CUDA on the simulated device.

    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated script.py [argument...]
    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated -m module [argument...]
    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated -c code [argument...]

It builds what is missing, starts the interpreter that SWAPKIT_CUDA_PYTHON names with the simulated
runtime loaded before torch looks for the real one, takes over the operators and runs the program.
The variables in `driver/cusim.h` say how the device is made.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build" / "cuda"
DRIVER = BUILD / "plain"
PYTHON = "SWAPKIT_CUDA_PYTHON"
INSIDE = "SWAPKIT_CUDA_SIMULATED"


def _make(folder: str, *targets: str) -> None:
    """Build what is missing. One process at a time: tests of several files begin at once."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", str(ROOT / folder), *targets], check=True)


def build_driver() -> Path:
    """Build the driver; return its file."""
    _make("tests/cuda")
    return DRIVER / "libcuda.so.1"


def build(*targets: str) -> Path:
    """Build the driver, the runtime and the operators; return the folder of the last two."""
    build_driver()
    _make("tests/cuda/runtime", *targets)
    code = "import importlib.metadata as m; print('torch-' + m.version('torch'))"
    name = subprocess.run(
        [os.environ[PYTHON], "-c", code], check=True, capture_output=True, text=True
    )
    return BUILD / name.stdout.strip()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which torch meets the simulation."""
    runtime = next(folder.glob("libcudart.so.*"))
    return {
        **os.environ,
        "LD_PRELOAD": f"{runtime} {os.environ.get('LD_PRELOAD', '')}".strip(),
        "LD_LIBRARY_PATH": _joined(
            f"{DRIVER}{os.pathsep}{folder}", os.environ.get("LD_LIBRARY_PATH")
        ),
        "PYTHONPATH": _joined(str(ROOT), os.environ.get("PYTHONPATH")),
        INSIDE: "1",
    }


def _joined(first: str, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first


def run_inside(program: list[str], install: Callable[[], int] | None = None) -> None:
    """Run the program in this interpreter, which the simulation was loaded into."""
    if install is None:
        from tests.cuda import operators

        install = operators.install
    install()
    kind, *rest = program
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = [kind, *rest[1:]]
        exec(compile(rest[0], "<code>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = program
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Start the program, or run it if this is the interpreter that was started."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    if os.environ.get(INSIDE):
        run_inside(sys.argv[1:])
        return
    if PYTHON not in os.environ:
        raise SystemExit(f"{PYTHON} names no interpreter that has a torch for CUDA")
    command = [os.environ[PYTHON], "-m", "tests.cuda.simulated", *sys.argv[1:]]
    os.execve(command[0], command, environment(build()))


if __name__ == "__main__":
    main()
