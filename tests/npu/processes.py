"""Programs on the simulated device, each in a process of its own: each has one allocator."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

BEGIN = """
import torch
from tests.npu import operators
operators.install()
"""
# Device memory straight from the runtime, `spare` bytes more than asked for; freed as soon as a
# tensor dies. Nothing of Python is left at the end for the functions to be called.
RAW_ALLOCATOR = '''
import ctypes, os, time
from tests.cuda.control import last_problem
from tests.npu.control import runtime
import torch_npu

spare = 32

def allocate(size, device, stream):
    pointer, room = ctypes.c_void_p(), ctypes.c_size_t(size + spare)
    failed = size and runtime().aclrtMallocAlign32(ctypes.byref(pointer), room, 0)
    return None if failed else pointer.value

def free(pointer, size, device, stream):
    runtime().aclrtFree(ctypes.c_void_p(pointer))

functions = (
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(allocate),
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(free),
)
addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
torch_npu._C._npu_changeCurrentAllocator(torch_npu._C._npu_customAllocator(*addresses))

def is_refused(work):
    """The queue is empty a moment before torch_npu knows that what was in it failed."""
    try:
        work()
        for _ in range(500):
            torch.npu.synchronize()
            time.sleep(0.01)
    except RuntimeError:
        return True
    return False

def end(*results):
    print(*results, flush=True)
    os._exit(0)
'''


def start(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on a simulated device of its own, from inside of the simulation."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )


def run(code: str, **environment: str) -> list[str]:
    """Run a program; return the lines it printed. It must end well."""
    done = start(code, **environment)
    assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()
