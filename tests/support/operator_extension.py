"""The example's operator, built as its users build theirs, with the tests' kernel in it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "operators"
KERNEL = ROOT / "tests" / "operators" / "delayed.cpp"


class OperatorExtension:
    """The extension module, and the functions of its kernel."""

    def __init__(self, file: Path) -> None:
        spec = importlib.util.spec_from_file_location("gmm", file)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.npu_gmm = module.npu_gmm
        library = ctypes.CDLL(str(file))  # its functions run without the GIL
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self.set_most_delay = ctypes.CFUNCTYPE(None, ctypes.c_int)(("set_most_delay", library))
        self.sum_at = ctypes.CFUNCTYPE(ctypes.c_double, address, size, ctypes.c_int)(
            ("sum_at", library)
        )
        self.double_at = ctypes.CFUNCTYPE(None, address, size)(("double_at", library))
        self.multiply_unhooked = ctypes.CFUNCTYPE(
            None, address, address, address, size, address, address
        )(("multiply_unhooked", library))
        self.fail_once = ctypes.CFUNCTYPE(size)(("fail_once", library))
        self.fail_often = ctypes.CFUNCTYPE(size, ctypes.c_int)(("fail_often", library))
        self.fail_guarded = ctypes.CFUNCTYPE(size)(("fail_guarded", library))
        self.refuses_freed = ctypes.CFUNCTYPE(ctypes.c_int)(("refuses_freed", library))
        self.refuses_freed_hooked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_bool)(
            ("refuses_freed_hooked", library)
        )
        self.nest = ctypes.CFUNCTYPE(size)(("nest", library))


def build_extension(folder: Path) -> OperatorExtension:
    """Build the example in a folder of its own by its setup.py, with nothing else set."""
    shutil.copytree(EXAMPLE, folder)
    (folder / "grouped_matmul.cpp").rename(folder / "plain_grouped_matmul.cpp")
    shutil.copy(KERNEL, folder / "grouped_matmul.cpp")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "CFLAGS": "-O0 -g0"},  # compiles in half of the time
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (built,) = folder.glob("gmm.*.so")
    return OperatorExtension(built)
