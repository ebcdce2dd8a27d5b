"""Record what torch's Python layer does with an allocator that is not its own.

    SWAPKIT_CUDA_PYTHON=... python -m tests.cuda.simulated -m tests.cuda.record

writes `recorded/torch-<version>.json`: for each C function that the statistics come down to, what
it raises under a pluggable allocator, and what its result looks like under torch's own. Tests that
have no torch for CUDA answer from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import swapkit
from tests.cuda import operators

FOLDER = Path(__file__).parent / "recorded"
# Functions of torch._C, and their arguments.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "_cuda_memoryStats": (0,),
    "_cuda_resetPeakMemoryStats": (0,),
    "_cuda_resetAccumulatedMemoryStats": (0,),
    "_cuda_memorySnapshot": ((0, 0),),
    "_cuda_getMemoryFraction": (0,),
    "_accelerator_isAllocatorInitialized": (),
    "_accelerator_getDeviceStats": (0,),
    "_accelerator_resetPeakStats": (0,),
    "_accelerator_resetAccumulatedStats": (0,),
    "_accelerator_emptyCache": (),
}


def describe(value: object) -> object:
    """Return the shape of a result: names and types, without the numbers."""
    if isinstance(value, dict):
        return {name: describe(item) for name, item in value.items()}
    if isinstance(value, list):
        return [describe(value[0])] if value else []
    return value if isinstance(value, bool) else type(value).__name__


def call_all() -> dict[str, object]:
    """Return what each function gives or raises on a device with one tensor."""
    held = torch.ones(1000, device="cuda")
    results: dict[str, object] = {}
    for name, arguments in FUNCTIONS.items():
        try:
            results[name] = {"returns": describe(getattr(torch._C, name)(*arguments))}
        except RuntimeError as error:
            results[name] = {"raises": str(error).splitlines()[0]}
    del held
    return results


def main() -> None:
    """Record in two processes, since a process has one allocator."""
    if sys.argv[1:] == ["ours"]:
        operators.install()
        with mock.patch("swapkit._runtime.allocators.accelerator_allocator.repair_statistics"):
            swapkit.install(device="cuda")
        sys.stdout.write(json.dumps(call_all()))
        return
    command = [sys.executable, "-m", "tests.cuda.record", "ours"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    recorded = {"native": call_all(), "pluggable": json.loads(done.stdout)}
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"torch-{torch.__version__.partition('+')[0]}.json"
    file.write_text(json.dumps(recorded, indent=1) + "\n")
    sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
