"""Take over the operators of torch_npu's tensors, so that a model trains on the simulated device.

`kernels/` runs torch's CPU kernels in the stream, behind torch_npu's queue of the host.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
from pathlib import Path

from torch_npu import npu

from tests.cuda.control import delay_stream

CYCLES_PER_MS = 2_000_000
BUILD = Path(__file__).parent.parent.parent / "build" / "npu"


def folder() -> Path:
    """Return where the operators for the torch_npu at hand are built."""
    return BUILD / f"torch_npu-{importlib.metadata.version('torch_npu')}"


def install() -> int:
    """Take over what the CPU can compute; return how many operators that are. Call it once.

    The device is not initialised by this, so that another allocator can still be chosen.
    """
    npu._sleep = sleep
    # Work that is still queued must not meet a torch that is being unloaded.
    atexit.register(_finish)
    native = ctypes.PyDLL(str(folder() / "operators.so"))
    return int(native.operators_install())


def sleep(cycles: int) -> None:
    """Let the current stream be busy, as `torch.npu._sleep` does on an NPU."""
    delay_stream(npu.current_stream().npu_stream, cycles / CYCLES_PER_MS)


def _finish() -> None:
    if npu.is_initialized():
        with contextlib.suppress(RuntimeError):
            npu.synchronize()
