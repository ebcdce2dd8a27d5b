"""The user's cache: files that one process compiles or measures, for all later processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit._runtime.shim.own_files import Untrusted, make_own_folder, open_own, own_folder
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = get_logger(__name__)

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
    """Return a file of the cache, which may be read-only; None: there is none that is safe."""
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
    return None


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
