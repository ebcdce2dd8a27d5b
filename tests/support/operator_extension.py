"""The example's operator, built as its users build theirs, with the tests' kernel in it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import swapkit
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLE = ROOT / "examples" / "operators"
KERNEL = ROOT / "tests" / "operators" / "delayed.cpp"
BUILDS = ROOT / "build" / "operators"
VARIABLES = ("CC", "CXX", "CPPFLAGS", "LDFLAGS", "CUDA_HOME")
# They compile in half of the time.
FLAGS = {"CFLAGS": "-O0 -g0"}


FORGETTING = ctypes.CFUNCTYPE(None)


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
        self._set_forgetting = ctypes.CFUNCTYPE(None, FORGETTING)(("set_forgetting", library))
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

    @contextlib.contextmanager
    def forgetting(
        self, operands: list[torch.Tensor], then: Callable[[], object]
    ) -> Iterator[None]:
        """Let this thread's kernels empty a list and call a function when they begin to run.

        What the function raises is raised in the end.
        """
        errors: list[BaseException] = []

        def call() -> None:
            operands.clear()
            try:
                then()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        callback = FORGETTING(call)
        self._set_forgetting(callback)
        try:
            yield
        finally:
            self._set_forgetting(FORGETTING())
        if errors:
            raise errors.pop()


def build_extension() -> OperatorExtension:
    """Build the example by its setup.py, with nothing else set, unless the same was built before.

    The builds are in `build/operators`, by a digest of all that goes into one.
    """
    folder = BUILDS / _digest()
    if not folder.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS, prefix="unfinished-") as unfinished:
            built = Path(unfinished) / "gmm"
            _build(built)
            with contextlib.suppress(OSError):  # another process was first
                built.rename(folder)
    (library,) = folder.glob("gmm.*.so")
    return OperatorExtension(library)


def _digest() -> str:
    """Return a digest of sources, headers, compiler, torch and Python."""
    headers = Path(swapkit.include_path())
    compiler = os.environ.get("CXX", "c++")
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, check=True)
    digest = hashlib.sha256(version.stdout)
    words = [sys.version, torch.__version__, torch.__file__, swapkit.library_path(), str(FLAGS)]
    words += [f"{name}={os.environ.get(name)}" for name in VARIABLES]
    digest.update("\0".join(words).encode())
    files = [KERNEL, Path(__file__), *(path for path in EXAMPLE.iterdir() if path.is_file())]
    for path in sorted([*files, *(path for path in headers.rglob("*") if path.is_file())]):
        digest.update(f"\0{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _build(folder: Path) -> None:
    shutil.copytree(EXAMPLE, folder)
    (folder / "grouped_matmul.cpp").rename(folder / "plain_grouped_matmul.cpp")
    shutil.copy(KERNEL, folder / "grouped_matmul.cpp")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, **FLAGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
