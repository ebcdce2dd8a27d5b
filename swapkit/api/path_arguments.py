"""Path arguments: read the file, or raise an error that names the argument."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from swapkit.errors import InvalidArgument, InvalidType
from swapkit.units import show

Value = TypeVar("Value")


def read_argument(name: str, path: object, read: Callable[[str], Value], expected: str) -> Value:
    """Return the content of the file that a path argument names.

    Args:
        name: name of the argument, for the error text.
        path: value of the argument.
        read: function that reads the file.
        expected: description of valid values, for the error text.

    Raises:
        InvalidType: `path` is not a path.
        InvalidArgument: there is no such file, or it cannot be read; `InvalidDocument` for its
            content.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"{name}={show(path)}: expected {expected}")
    file = os.fspath(path)
    if not isinstance(file, str) or not file or "\0" in file:
        raise InvalidArgument(f"{name}={show(file)}: expected {expected}")
    try:
        return read(file)
    except FileNotFoundError:
        where = "" if os.path.isabs(file) else f" in {os.getcwd()!r}"
        reason = f"there is no such file{where}"
    except IsADirectoryError:
        reason = "this is a folder"
    except OSError as error:
        reason = f"it cannot be read: {error.strerror or error}"
    raise InvalidArgument(f"{name}={file!r}: {reason}; expected {expected}")
