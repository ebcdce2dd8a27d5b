"""Compiling the C++ shim (`library.py`), once for each torch, against its headers.

The library is kept in the user's cache under a name made of torch's version, its C++ ABI and the
sources, so that a new torch or a new swapkit never meets an old shim.

Nearly all of the time goes to torch's headers. So the sources are compiled as two units, at the
same time: those that need ATen's headers, and those that need only c10's; each unit reads its
headers once. (12 sources one by one take 22 s of CPU, two units 11 s, one unit 8.5 s.) A unit is
one translation unit: names in its sources' anonymous namespaces must not clash. `make check`
compiles each source by itself, too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._runtime.shim.user_cache import alone, cache_folder, find_cached
from swapkit._runtime.torch_compat.internals import CXX11_ABI
from swapkit.errors import NativeBuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
CPP = _FOLDER / "cpp"
SOURCES = tuple(sorted(CPP.glob("*/*.cpp")))
CORE_HEADERS = _FOLDER.parents[1] / "_native" / "include"
HEADERS = (*sorted(CPP.glob("*/*.hpp")), *sorted(CORE_HEADERS.glob("*.h")))
# Nobody stands in for one of its functions: they are called, and inlined, directly.
DIRECT = "-fno-semantic-interposition"
OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=default", DIRECT, "-w")
LIBRARIES = ("-lc10", "-ltorch_cpu")
LOCK = "shim.lock"
# How long to wait for another process that compiles; then this one compiles beside it.
PATIENCE_SECONDS = 300.0


class Build(NamedTuple):
    """The compiled shim, and what it took to get it."""

    library: Path
    seconds: float | None  # None: it was there already


def build_shim(*, force: bool = False) -> Build:
    """Return the shim for the torch at hand from the cache, compiling it if it is not there.

    Of processes that ask for it at once, one compiles and the others wait for it.

    Args:
        force: compile it in any case, and replace the one in the cache.

    Raises:
        NativeBuildError: there is no compiler, it fails (the message holds its output), or there is
            no folder to keep the library in.
    """
    cached = None if force else find_cached(shim_name())
    if cached is not None:
        return Build(cached, None)
    folder = cache_folder()
    if folder is None:
        raise NativeBuildError(
            "there is no folder to keep swapkit's compiled shim in: "
            "name one that can be written in XDG_CACHE_HOME"
        )
    with alone(folder, LOCK, PATIENCE_SECONDS, _say_waiting):
        cached = None if force else find_cached(shim_name())  # of another process meanwhile
        if cached is not None:
            return Build(cached, None)
        started = time.monotonic()
        library = compile_shim(folder)
        return Build(library, time.monotonic() - started)


def shim_name() -> str:
    """Return the file name that only this Python, torch, ABI, source and options have."""
    python = sys.implementation.cache_tag
    options = " ".join(_options())
    key = f"{python} {torch.__version__} {CXX11_ABI} {platform.machine()} {options}".encode()
    key += b"".join(source.read_bytes() for source in (*SOURCES, *HEADERS))
    digest = hashlib.sha256(key).hexdigest()[:16]
    return f"shim-{python}-torch{torch.__version__}-abi{CXX11_ABI}-{digest}.so"


def compile_shim(folder: Path, *, often: str = ", once") -> Path:
    """Compile the shim into a folder, where it appears whole or not at all; return its file.

    Args:
        folder: of the user's own.
        often: what the log says of how often this happens.

    Raises:
        NativeBuildError: there is no compiler, or it fails; the message holds its output.
    """
    compiler = _find_compiler()
    headers = _find_headers()
    # A warning, so that it shows where nobody has set up logging: nothing else moves for a while.
    _log.warning(
        "swapkit: compiling its allocator for torch %s%s: about 10 s", torch.__version__, often
    )
    library = folder / shim_name()
    with tempfile.TemporaryDirectory(dir=folder, prefix="shim-", suffix=".tmp") as temporary:
        units = _units()
        objects = [str(Path(temporary) / f"unit{number}.o") for number in range(len(units))]
        # The compiler reads an empty file and, before it, all sources of a unit.
        source = ("-c", "-x", "c++", os.devnull)
        _run(
            [*compiler, *_options(), *headers, *_include(unit), *source, "-o", target]
            for unit, target in zip(units, objects, strict=True)
        )
        linked = Path(temporary) / library.name
        libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
        _run([[*compiler, "-shared", *objects, "-o", str(linked), libraries, *LIBRARIES]])
        linked.replace(library)
    return library


def _say_waiting() -> None:
    _log.warning("swapkit: waiting for another process that compiles its allocator")


def _options() -> tuple[str, ...]:
    """Return the options that say what is compiled; SWAPKIT_DEBUG asks for assertions."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={CXX11_ABI}"
    is_checked = os.environ.get("SWAPKIT_DEBUG", "") not in {"", "0"}
    return (*OPTIONS, abi, *(("-DSK_DEBUG",) if is_checked else ()))


def _find_compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise NativeBuildError(
            f"swapkit needs a C++ compiler once, to put its pool under torch: {compiler[0]!r} was "
            "not found. Install g++ (Debian: `apt-get install g++`) or name one in CXX."
        )
    return compiler


def _find_headers() -> list[str]:
    python_headers = Path(sysconfig.get_path("include"))
    if not (python_headers / "Python.h").exists():
        raise NativeBuildError(
            f"swapkit needs Python's headers once, to put its pool under torch: {python_headers} "
            "has no Python.h. Install them (Debian: `apt-get install python3-dev`)."
        )
    torch_headers = Path(torch.__file__).parent / "include"
    return [f"-I{each}" for each in (torch_headers, python_headers, CORE_HEADERS, CPP)]


def _units() -> list[tuple[Path, ...]]:
    """Return the sources that are compiled together."""
    if len(os.sched_getaffinity(0)) == 1:
        return [SOURCES]
    heavy = tuple(source for source in SOURCES if b"#include <ATen/" in source.read_bytes())
    light = tuple(source for source in SOURCES if source not in heavy)
    return [unit for unit in (heavy, light) if unit]


def _include(unit: tuple[Path, ...]) -> list[str]:
    return [word for source in unit for word in ("-include", str(source))]


def _run(commands: Iterable[Sequence[str]]) -> None:
    """Run commands at the same time, until all have ended.

    Raises:
        NativeBuildError: one fails.
    """
    running: list[tuple[Sequence[str], subprocess.Popen[str]]] = []
    failed: list[str] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            running.append((command, process))
        for command, process in running:
            output, _ = process.communicate()
            if process.returncode != 0:
                failed.append(f"$ {shlex.join(command)}\n{output.strip()}")
    finally:
        for _, process in running:
            process.kill()  # of no effect on one that has ended
            process.wait()
    if failed:
        text = "\n".join(failed)
        raise NativeBuildError(
            f"swapkit's allocator shim did not compile with torch {torch.__version__}:\n{text}"
        )
