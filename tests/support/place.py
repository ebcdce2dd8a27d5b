"""Where the programs run: on the device that SWAPKIT_TEST_DEVICE names, by default the CPU.

On CUDA SWAPKIT_TEST_ALLOCATOR may be "torch", which leaves torch's own allocator in place. Without
a GPU they run on the simulated one:

    SWAPKIT_TEST_DEVICE=cuda python -m tests.cuda.simulated -m pytest tests/conformance
"""

from __future__ import annotations

import os
import warnings

import torch

import swapkit

DEVICE = os.environ.get("SWAPKIT_TEST_DEVICE", "cpu")
ALLOCATOR = os.environ.get("SWAPKIT_TEST_ALLOCATOR", "swapkit")
ON_CPU = DEVICE == "cpu"


def install() -> None:
    """Install swapkit on the device."""
    swapkit.install(device=DEVICE, allocator=ALLOCATOR)


def make_default() -> None:
    """Let tensors be made on the device, by every thread, unless it is said otherwise."""
    if not ON_CPU:
        install()  # before the device is first used
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The newer way is a function mode, which everything that is tested would then run in.
            torch.set_default_tensor_type(f"torch.{DEVICE}.FloatTensor")
