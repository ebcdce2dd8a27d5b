"""Compiling and loading `shim.cpp`, the one C++ file that puts the pool under torch on the CPU.

It is compiled on first use, against the headers of the torch at hand, and kept in the user's cache
under a name made of torch's version, its C++ ABI and the source, so that a new torch or a new
swapkit never meets an old shim. Each process compiles into a file of its own and renames it: two
at once do the work twice, and either result is right.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from swapkit.errors import NativeBuildError, Unsupported

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("shim.cpp")


class Shim:
    """The loaded shim; it is never unloaded, since tensors keep pointers into it."""

    def __init__(self, library: Path) -> None:
        """Load a compiled shim.

        Raises:
            NativeBuildError: the file cannot be loaded.
        """
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise NativeBuildError(
                f"swapkit's allocator shim could not be loaded: {error}"
            ) from None

    def install(self, addresses: tuple[int, int, int, int]) -> None:
        """Make the entry's functions torch's CPU allocator.

        Raises:
            Unsupported: other code has registered an allocator with a higher priority.
        """
        install = self._library.swapkit_shim_install
        install.restype = ctypes.c_bool
        if not install(*(ctypes.c_void_p(address) for address in addresses)):
            raise Unsupported(
                "torch's CPU allocator cannot be replaced: other code in this process has "
                "registered one with a higher priority (c10::SetCPUAllocator)"
            )

    def uninstall(self) -> None:
        """Give torch its former CPU allocator back."""
        self._library.swapkit_shim_uninstall()


def load_shim() -> Shim:
    """Return the shim for the torch at hand, compiling it if it is not in the cache.

    Raises:
        NativeBuildError: there is no compiler, or it fails; the message holds its output.
    """
    folder = cache_folder()
    if folder is None:
        # The library stays loaded after its file is gone.
        with tempfile.TemporaryDirectory(prefix="swapkit-") as temporary:
            library = Path(temporary) / shim_name()
            _compile(library)
            return Shim(library)
    library = folder / shim_name()
    if not library.exists():
        _compile(library)
    return Shim(library)


def shim_name() -> str:
    """Return the file name that only this torch, ABI and source have."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # noqa: SLF001 - torch has no public name for it
    key = f"{torch.__version__} {abi} {platform.machine()}".encode() + SOURCE.read_bytes()
    return f"shim-torch{torch.__version__}-abi{abi}-{hashlib.sha256(key).hexdigest()[:16]}.so"


def cache_folder() -> Path | None:
    """Return a folder of the user's own, made if need be; None if there is none to write to."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "swapkit"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _log.warning("no cache for swapkit's compiled shim (%s): it is compiled each time", error)
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        _log.warning("%s cannot be written: swapkit's shim is compiled each time", folder)
        return None
    return folder


def _compile(library: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise NativeBuildError(
            f"swapkit needs a C++ compiler once, to put its pool under torch: {compiler[0]!r} was "
            "not found. Install g++ (Debian: `apt-get install g++`) or name one in CXX."
        )
    torch_folder = Path(torch.__file__).parent
    descriptor, name = tempfile.mkstemp(dir=library.parent, prefix="shim-", suffix=".tmp")
    os.close(descriptor)
    command = [
        *compiler,
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=default", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",  # noqa: SLF001
        f"-I{torch_folder / 'include'}",
        str(SOURCE),
        *("-o", name, f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NativeBuildError(
                f"swapkit's allocator shim did not compile with torch {torch.__version__}:\n"
                f"$ {shlex.join(command)}\n{done.stderr.strip()}"
            )
        Path(name).replace(library)
    finally:
        Path(name).unlink(missing_ok=True)
