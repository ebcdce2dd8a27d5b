"""The one way to a file outside of the package that swapkit loads, executes or locks.

Whoever can write such a file runs code as this user. So a file and its folder must belong to this
user or to root, and nobody else may write to them. Both are checked after they are opened, and then
used through their descriptors: another file or folder that takes their names meanwhile is not used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
