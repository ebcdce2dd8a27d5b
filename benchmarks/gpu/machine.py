"""What the machine has: the GPU, its driver, the versions, the clocks."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

QUERIES = {
    "driver": "driver_version",
    "memory": "memory.total",
    "sm_clock": "clocks.sm",
    "sm_clock_max": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
    "link_generation": "pcie.link.gen.max",
    "link_width": "pcie.link.width.max",
}
QUERY_SECONDS = 20
LIBRARY = os.environ.get("SWAPKIT_CUDA_DRIVER") or "libcuda.so.1"


def missing_gpu() -> str | None:
    """Return why there is no NVIDIA GPU to be used, in a sentence; None if there is one."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return f"no NVIDIA GPU: the driver's library {LIBRARY} was not found"
    status = driver.cuInit(0)
    if status != 0:
        return f"no NVIDIA GPU: the driver could not be initialised (cuInit: {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return "no NVIDIA GPU: the driver sees no device"
    return None


def missing_torch() -> str | None:
    """Return why torch cannot use the GPU, in a sentence; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch; set GPU_PYTHON to another interpreter"
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; set GPU_PYTHON to another "
            "interpreter"
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) does not find the GPU"
    return None


def describe(device: str) -> dict[str, str]:
    """Return what results depend on; asks as little of the device as it can."""
    import torch

    found = {
        "device": device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu_cores": str(os.cpu_count()),
        "compiler": first_line("gcc", "--version"),
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = str(properties.name)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = str(torch.version.cuda)
        found |= query_driver()
    return found


def query_driver() -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU; nothing where it is missing."""
    answer = first_line(
        "nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader"
    )
    values = [value.strip() for value in answer.split(",")]
    if len(values) != len(QUERIES):
        return {}
    return dict(zip(QUERIES, values, strict=True))


def first_line(*command: str) -> str:
    """Return the first line that a command prints; empty if it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")
