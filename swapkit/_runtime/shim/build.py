"""Compiles the C++ shim (`library.py`) once per torch version, against torch's headers.

The library is kept in the user's cache. Its name contains torch's version, its C++ ABI and a hash
of the sources, so that a new torch or a new swapkit never loads an old shim.

Nearly all of the compile time goes to torch's headers. So the sources are compiled as two parallel
units, and each unit reads its headers once: sources that need ATen's headers, and sources that need
only c10's. Half of a unit's time is reading headers, the other half optimizing code. A unit is one
translation unit: names in its sources' anonymous namespaces must not clash. `make check` also
compiles each source separately.
"""

from __future__ import annotations

import hashlib
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

from swapkit._runtime.shim.own_files import FILE_MODE, own_folder
from swapkit._runtime.shim.user_cache import alone, cache_folder, find_cached, remove_abandoned
from swapkit._runtime.torch_compat.internals import CXX11_ABI
from swapkit.errors import NativeBuildError
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_log = get_logger(__name__)

_FOLDER = Path(__file__).parent
CPP = _FOLDER / "cpp"
SOURCES = tuple(sorted(CPP.glob("*/*.cpp")))
CORE_HEADERS = _FOLDER.parents[1] / "_native" / "include"
HEADERS = (*sorted(CPP.glob("*/*.hpp")), *sorted(CORE_HEADERS.glob("*.h")))
# No other library replaces the shim's functions: the compiler may call and inline them directly.
DIRECT = "-fno-semantic-interposition"
OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=default", DIRECT, "-w")
LIBRARIES = ("-lc10", "-ltorch_cpu")
LOCK = "shim.lock"
PARTIAL = "shim-", ".tmp"  # the names of folders for compilations begin and end so
# For messages: on two idle cores, and on two that ten processes share.
COMPILE_TIME = "20 to 90 s"
# How long to wait for another process that compiles. After that, this process compiles too.
PATIENCE_SECONDS = 300.0


class Build(NamedTuple):
    """The compiled shim and its compile time."""

    library: Path
    seconds: float | None  # None: it was in the cache


def build_shim(*, force: bool = False) -> Build:
    """Return the shim for the installed torch from the cache; compile it if it is not there.

    If several processes call this at once, one compiles and the others wait for it.

    Args:
        force: compile even if the cache has the library, and replace it.

    Raises:
        NativeBuildError: there is no compiler, it fails (the message has its output), or there is
            no folder to keep the library in.
    """
    cached = None if force else find_cached(shim_name())
    if cached is not None:
        return Build(cached, None)
    folder = cache_folder()
    if folder is None:
        raise NativeBuildError(
            "swapkit has no writable folder for its compiled shim: set XDG_CACHE_HOME to one"
        )
    with alone(folder, LOCK, PATIENCE_SECONDS, _say_waiting):
        cached = None if force else find_cached(shim_name())  # from another process meanwhile
        if cached is not None:
            return Build(cached, None)
        remove_abandoned(folder, f"{PARTIAL[0]}*{PARTIAL[1]}")
        started = time.monotonic()
        library = compile_shim(folder)
        return Build(library, time.monotonic() - started)


def shim_name() -> str:
    """Return a file name that is unique for this Python, torch, ABI, source and options."""
    python = sys.implementation.cache_tag
    options = " ".join(_options())
    key = f"{python} {torch.__version__} {CXX11_ABI} {platform.machine()} {options}".encode()
    key += b"".join(source.read_bytes() for source in (*SOURCES, *HEADERS))
    digest = hashlib.sha256(key).hexdigest()[:16]
    return f"shim-{python}-torch{torch.__version__}-abi{CXX11_ABI}-{digest}.so"


def compile_shim(folder: Path, *, often: str = ", once") -> Path:
    """Compile the shim into a folder; return the file, which appears there atomically.

    Args:
        folder: a folder that only the user can write to.
        often: the words in the log message for how often this happens.

    Raises:
        NativeBuildError: there is no compiler, or it fails; the message has its output.
    """
    compiler = find_compiler()
    headers = find_headers()
    # A warning, so that it shows without logging set up: the program stands still for a while.
    _log.warning(
        "swapkit: compiling its allocator for torch %s%s: %s",
        torch.__version__,
        often,
        COMPILE_TIME,
    )
    name = shim_name()
    prefix, suffix = PARTIAL
    with (
        own_folder(folder) as own,
        tempfile.TemporaryDirectory(dir=own, prefix=prefix, suffix=suffix) as temporary,
    ):
        units = _units()
        objects = [f"unit{number}.o" for number in range(len(units))]
        # The compiler reads all sources of a unit through `-include`, then an empty file.
        source = ("-c", "-x", "c++", os.devnull)
        _run(
            temporary,
            (
                [*compiler, *_options(), *headers, *_include(unit), *source, "-o", target]
                for unit, target in zip(units, objects, strict=True)
            ),
        )
        libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
        _run(temporary, [[*compiler, "-shared", *objects, "-o", name, libraries, *LIBRARIES]])
        linked = Path(temporary) / name
        linked.chmod(FILE_MODE)
        linked.replace(own / name)
    return folder / name


def _say_waiting() -> None:
    _log.warning("swapkit: waiting for another process that compiles its allocator")


def _options() -> tuple[str, ...]:
    """Return the options that affect the library; SWAPKIT_DEBUG turns assertions on."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={CXX11_ABI}"
    is_checked = os.environ.get("SWAPKIT_DEBUG", "") not in {"", "0"}
    return (*OPTIONS, abi, *(("-DSK_DEBUG",) if is_checked else ()))


def find_compiler() -> list[str]:
    """Return the words of the compiler's command.

    Raises:
        NativeBuildError: there is no compiler.
    """
    command = os.environ.get("CXX") or "c++"
    try:
        compiler = shlex.split(command)
    except ValueError:  # no closing quotation
        compiler = []
    if not compiler:
        raise NativeBuildError(
            f"CXX={command!r} is not a command: set CXX to a C++ compiler, with its options if it "
            "needs some, such as CXX='g++ -pipe', or unset it."
        )
    if shutil.which(compiler[0]) is None:
        raise NativeBuildError(
            "swapkit needs a C++ compiler once, to compile its allocator for torch: "
            f"{compiler[0]!r} was not found. Install g++ (Debian: `apt-get install g++`), or set "
            "CXX to a compiler."
        )
    if os.sep in compiler[0]:
        compiler[0] = os.path.abspath(compiler[0])  # it runs in another folder
    return compiler


def find_headers() -> list[str]:
    """Return the options for the folders of headers.

    Raises:
        NativeBuildError: Python's headers are missing.
    """
    python_headers = Path(sysconfig.get_path("include"))
    if not (python_headers / "Python.h").exists():
        raise NativeBuildError(
            "swapkit needs Python's headers once, to compile its allocator for torch: "
            f"{python_headers} has no Python.h. Install them (Debian: `apt-get install "
            "python3-dev`)."
        )
    torch_headers = Path(torch.__file__).parent / "include"
    return [f"-I{each}" for each in (torch_headers, python_headers, CORE_HEADERS, CPP)]


def _units() -> list[tuple[Path, ...]]:
    """Return the groups of sources that are compiled together."""
    if len(os.sched_getaffinity(0)) == 1:
        return [SOURCES]
    heavy = tuple(source for source in SOURCES if b"#include <ATen/" in source.read_bytes())
    light = tuple(source for source in SOURCES if source not in heavy)
    return [unit for unit in (heavy, light) if unit]


def _include(unit: tuple[Path, ...]) -> list[str]:
    return [word for source in unit for word in ("-include", str(source))]


def _run(folder: str, commands: Iterable[Sequence[str]]) -> None:
    """Run commands in a folder in parallel, and wait for all of them.

    Raises:
        NativeBuildError: a command fails.
    """
    running: list[tuple[Sequence[str], subprocess.Popen[str]]] = []
    failed: list[str] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command,
                cwd=folder,
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
            process.kill()  # no effect if it has ended
            process.wait()
    if failed:
        text = "\n".join(failed)
        raise NativeBuildError(
            f"swapkit's allocator shim did not compile with torch {torch.__version__}:\n{text}"
        )
