"""Compiles the C++ shim once per torch version, into the user's cache."""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import platform
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from swapkit._runtime.torch_compat.internals import CXX11_ABI
from swapkit.errors import NativeBuildError
from swapkit.texts import get_logger

# ---- own files -----------------------------------------------------------------------------------
#
# The one way to a file outside of the package that swapkit loads, executes or locks.
#
# Whoever can write such a file runs code as this user. So a file and its folder must belong to this
# user or to root, and nobody else may write to them. Both are checked after they are opened, and
# then used through their descriptors: another file or folder that takes their names meanwhile is
# not used.

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Untrusted(PermissionError):
    """Other users can change a file or folder; the message names it, its owner and a remedy."""


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of this user or of root, in such a folder; return its descriptor.

    `name_of` makes a path of it.

    Args:
        path: of the file. A link is refused.
        flags: as for `os.open`. A new file is readable by this user alone, whatever the umask.

    Raises:
        Untrusted: another user can change the file or its folder.
        OSError: it cannot be opened.
    """
    with own_folder(path.parent) as folder:
        try:
            descriptor = os.open(folder / path.name, flags | os.O_NOFOLLOW, FILE_MODE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Untrusted(f"{path} is a link: remove it") from None
            raise
    try:
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def name_of(descriptor: int) -> Path:
    """Return a path to an open file or folder, valid in this process while it is open."""
    return Path(f"/proc/self/fd/{descriptor}")


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Open a folder of this user or of root; the block gets a path that is valid inside it.

    Raises:
        Untrusted: another user can change the folder.
        OSError: it cannot be opened.
    """
    name = folder.lstat()
    if stat.S_ISLNK(name.st_mode):
        _check(folder, name)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(folder, os.fstat(descriptor))
        yield name_of(descriptor)
    finally:
        os.close(descriptor)


def make_own_folder(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone, whatever the umask.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    if not folder.parent.is_dir():
        make_own_folder(folder.parent)
    try:
        folder.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder)) from None
    else:
        if stat.S_IMODE(folder.lstat().st_mode) & FOLDER_MODE != FOLDER_MODE:
            folder.chmod(FOLDER_MODE)


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        raise Untrusted(
            f"{path} belongs to {_owner(found.st_uid)}: remove it, or set XDG_CACHE_HOME to a "
            "folder of yours"
        )
    # The mode of a link says nothing: only its owner can replace it in a shared folder.
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS_WRITE:
        raise Untrusted(
            f"{path} of {_owner(found.st_uid)} can be written by other users (mode "
            f"{stat.S_IMODE(found.st_mode):o}): run `chmod go-w {path}` if its content is yours"
        )


def _owner(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    return f"uid {user}"


# ---- user cache ----------------------------------------------------------------------------------
#
# The user's cache: files that one process compiles or measures, for all later processes.

_log = get_logger("build")

PACKAGE = "swapkit_shim"  # of the wheel (`build_wheel`)
# Where it is installed: beside torch, swapkit or what else the interpreter has. Its files are not
# checked as those of the cache are: who can change them can change these packages, too.
PACKAGED = tuple(
    folder / PACKAGE
    for folder in (
        Path(torch.__file__).parents[1],
        Path(__file__).parents[3],
        Path(sysconfig.get_path("platlib")),
    )
)
LOOK_SECONDS = 0.05
ABANDONED_SECONDS = 3600.0  # no compilation takes that long


def cache_folder() -> Path | None:
    """Return the user's cache folder, created if needed; None: no folder is safe and writable.

    That is `swapkit` in XDG_CACHE_HOME or in `~/.cache`. If it is not writable (a read-only home
    directory, or none), or if other users can write to it, a folder in the temporary directory
    takes its place.
    """
    try:
        return _usable(_user_folder())
    except OSError as error:
        reason = str(error)
    try:
        folder = _usable(_temporary_folder())
    except OSError as error:
        _warn_once(f"swapkit has no cache: {reason}; {error}")
        return None
    _warn_once(f"swapkit uses {folder} as its cache: {reason}")
    return folder


def find_cached(name: str) -> Path | None:
    """Return a file of the cache or of the shim's wheel; None: there is none that is safe.

    Either may be read-only.
    """
    for place in (_user_folder, _temporary_folder):
        try:
            file = place() / name
            os.close(open_own(file))
        except Untrusted as error:
            _warn_once(f"swapkit does not use {file}: {error}")
        except OSError:
            continue
        else:
            return file
    packaged = (folder / name for folder in PACKAGED)
    return next((file for file in packaged if file.is_file()), None)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove folders that killed processes have not removed from a cache folder.

    Args:
        folder: the cache folder.
        pattern: a glob of their names. They are left alone for `ABANDONED_SECONDS`.
    """
    with contextlib.suppress(OSError), own_folder(folder) as own:
        for each in own.glob(pattern):
            if time.time() - each.lstat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def alone(
    folder: Path | None, name: str, patience_seconds: float, waits: Callable[[], None] | None = None
) -> Iterator[None]:
    """Run the block in one process at a time, as far as the file system and patience allow.

    The lock belongs to an open file, so it is released if the process dies.

    Args:
        folder: of the lock file; None: run without a lock.
        name: of the lock file, which is never deleted.
        patience_seconds: how long to wait for another process before running anyway.
        waits: called once before waiting for another process.
    """
    if folder is None:
        yield
        return
    try:
        descriptor = open_own(folder / name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if isinstance(error, Untrusted):
            _warn_once(f"swapkit runs without its lock: {error}")
        yield
        return
    try:
        _await_lock(descriptor, patience_seconds, waits)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _await_lock(descriptor: int, patience_seconds: float, waits: Callable[[], None] | None) -> None:
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waits is not None:
                waits()
                waits = None
            time.sleep(LOOK_SECONDS)
        except OSError:  # a file system without locks
            return
        else:
            return


def _user_folder() -> Path:
    """Return the folder of first choice; raises OSError if the user has no home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # XDG: a relative path is to be ignored
        return named / "swapkit"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    if not home.is_absolute():
        raise FileNotFoundError(f"the home directory {str(home)!r} is not an absolute path")
    return home / ".cache" / "swapkit"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"swapkit-{os.geteuid()}"


def _usable(folder: Path) -> Path:
    """Return a folder after making it if needed; raises OSError if it is not safe or writable."""
    make_own_folder(folder)
    with own_folder(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
    return folder


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


# ---- build ---------------------------------------------------------------------------------------
#
# Compiles the C++ shim (`library.py`) once per torch version, against torch's headers.
#
# The library is kept in the user's cache. Its name contains torch's version, its C++ ABI and a hash
# of the sources, so that a new torch or a new swapkit never loads an old shim.
#
# Nearly all of the compile time goes to torch's headers. So the sources are compiled as two
# parallel units, and each unit reads its headers once: sources that need ATen's headers, and
# sources that need only c10's. Half of a unit's time is reading headers, the other half optimizing
# code. A unit is one translation unit: names in its sources' anonymous namespaces must not clash.
# `make check` also compiles each source separately.


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
    with alone(folder, LOCK, PATIENCE_SECONDS, _log_waiting):
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


def _log_waiting() -> None:
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


# ---- wheel ---------------------------------------------------------------------------------------
#
# The compiled shim as a package of its own, for machines without a compiler.


def build_wheel(folder: Path, library: Path, release: str) -> Path:
    """Write the wheel `swapkit-shim` into a folder, which is made; return the file.

    It needs exactly this version of swapkit and of torch; a swapkit beside another build of torch
    compiles a shim of its own.

    Args:
        folder: of the wheel.
        library: the shim for the installed torch.
        release: of swapkit.

    Raises:
        OSError: the file cannot be written.
    """
    torchs, _, local = torch.__version__.partition("+")
    builds = ["torch" + torchs, local, library.stem.rpartition("-")[2]]  # it has a digest
    version = f"{release}{'.' if '+' in release else '+'}{'.'.join(filter(None, builds))}"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    information = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/{library.name}": library.read_bytes(),
        f"{information}/METADATA": (
            f"Metadata-Version: 2.1\nName: swapkit-shim\nVersion: {version}\n"
            f"Summary: swapkit's compiled shim for torch {torch.__version__}\n"
            f"Requires-Dist: swapkit=={release}\nRequires-Dist: torch=={torchs}\n"
        ).encode(),
        f"{information}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: swapkit build\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ).encode(),
    }
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    record.append(f"{information}/RECORD,,\n")
    files[f"{information}/RECORD"] = "\n".join(record).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{PACKAGE}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
