"""The user's cache: files that one process compiles or measures, for all later processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05


def cache_folder() -> Path | None:
    """Return the user's cache folder, created if needed; None: no folder is writable.

    That is `swapkit` in XDG_CACHE_HOME or in `~/.cache`. If it is not writable (a read-only home
    directory, or none), a folder in the temporary directory takes its place.
    """
    try:
        folder = _user_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return _temporary_instead(str(error))
    if not os.access(folder, os.W_OK | os.X_OK):
        return _temporary_instead(f"{folder} is not writable")
    return folder


def find_cached(name: str) -> Path | None:
    """Return a file of the cache, which may be read-only; None: there is no such file."""
    with contextlib.suppress(RuntimeError):
        file = _user_folder() / name
        if os.access(file, os.R_OK):
            return file
    folder = _temporary_folder()
    if _is_own(folder) and os.access(folder / name, os.R_OK):
        return folder / name
    return None


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
        file = (folder / name).open("w")
    except OSError:
        yield
        return
    with file:
        _await_lock(file.fileno(), patience_seconds, waits)
        yield  # closing the file releases the lock


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
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swapkit"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"swapkit-{os.geteuid()}"


def _temporary_instead(reason: str) -> Path | None:
    folder = _temporary_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        _warn_once(f"swapkit has no cache: {reason}, and {folder} is not private to this user")
        return None
    _warn_once(f"swapkit uses {folder} as its cache: {reason}")
    return folder


def _is_own(folder: Path) -> bool:
    """Return whether only this user can write to a folder: files in it are loaded as code."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_private


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
