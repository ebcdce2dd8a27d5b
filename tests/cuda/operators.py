"""Take over the operators of CUDA tensors, so that a model trains on the simulated device.

Most of it is `kernels/`, which runs torch's CPU kernels in the stream. Here are the operators that
have no CPU kernel, put together from others, and the choices torch must not make.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table

from tests.cuda.control import keep_busy

if TYPE_CHECKING:
    from collections.abc import Callable

BUILD = Path(__file__).parent.parent.parent / "build" / "cuda"

# Kernels that exist only for GPUs, and are worth having: torch can also put them together.
COMPOSED = ("_fused_rms_norm_backward",)
CYCLES_PER_MS = 2_000_000

_libraries: list[Any] = []


def folder() -> Path:
    """Return where the runtime and the operators for the torch at hand are built."""
    return BUILD / f"torch-{importlib.metadata.version('torch')}"


def install() -> int:
    """Take over what the CPU can compute; return how many operators that are. Call it once.

    CUDA is not initialised by this, so that another allocator can still be chosen.
    """
    # Its kernels are not torch's own. What remains are those that are composed of operators.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._sleep = sleep
    # Work that is still queued must not meet a torch that is being unloaded.
    atexit.register(_finish)
    native = ctypes.PyDLL(str(folder() / "operators.so"))
    return int(native.operators_install()) + _install_composed()


def sleep(cycles: int) -> None:
    """Let the current stream be busy, as `torch.cuda._sleep` does."""
    keep_busy(torch.cuda.current_stream(), cycles / CYCLES_PER_MS)


def _finish() -> None:
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()


def _install_composed() -> int:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    _libraries.append(library)
    done = 0
    for name in COMPOSED:
        packet = getattr(torch.ops.aten, name, None)
        composed: Callable[..., Any] | None = packet and decomposition_table.get(packet.default)
        if composed is not None:
            with warnings.catch_warnings(action="ignore"):  # that there was a kernel already
                library.impl(name, composed)
            done += 1
    return done
