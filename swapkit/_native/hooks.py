"""The library of the operator hooks, `libswapkit.so`: where it is, and its functions' addresses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit.errors import NativeBuildError

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libswapkit.so"
INCLUDE = FOLDER / "include"
COMPAT = INCLUDE / "compat"


def hook_addresses(functions: Iterable[str]) -> dict[str, int]:
    """Return the addresses of functions of the library, which stays loaded.

    If an extension has loaded a copy of the library from elsewhere, that copy is used: a process
    has one list of operators.

    Raises:
        NativeBuildError: the library is missing.
    """
    library = _load()
    addresses = {}
    for function in functions:
        address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        assert address is not None
        addresses[function] = address
    return addresses


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY.name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass  # no extension has loaded it
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeBuildError(
            f"swapkit's library of operator hooks could not be loaded ({error}). It is compiled "
            "when swapkit is installed: run `pip install --force-reinstall swapkit`, or `make "
            "setup` in a checkout, with gcc available."
        ) from None
