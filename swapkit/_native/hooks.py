"""The library of the operator hooks, `libswapkit.so`: where it is, and its functions' addresses."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from swapkit.errors import NativeBuildError

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libswapkit.so"
INCLUDE = FOLDER / "include"
COMPAT = INCLUDE / "compat"
RTLD_DI_LINKMAP = 2  # of <dlfcn.h>


def hook_addresses(functions: Iterable[str]) -> dict[str, int]:
    """Return the addresses of functions of the library, which stays loaded.

    If an extension has loaded a copy of the library from elsewhere, that copy is used: a process
    has one list of operators.

    Raises:
        NativeBuildError: the library is missing, or the loaded copy lacks a function.
    """
    library = _load()
    addresses = {}
    for function in functions:
        try:
            found = getattr(library, function)
        except AttributeError:
            raise NativeBuildError(
                f"the process has loaded {_path_of(library)}, which has no function {function}: it "
                "is of another version of swapkit, or of another project. Link or run the "
                f"extension that loads it with {LIBRARY} instead."
            ) from None
        address = ctypes.cast(found, ctypes.c_void_p).value
        assert address is not None
        addresses[function] = address
    return addresses


class _LinkMap(ctypes.Structure):
    """The first members of glibc's `struct link_map`."""

    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


def _path_of(library: ctypes.CDLL) -> str:
    """Return the path that a library was loaded from, or its name if the path is unknown."""
    found = ctypes.POINTER(_LinkMap)()
    handle = ctypes.c_void_p(library._handle)  # noqa: SLF001 - ctypes has no other name for it
    if ctypes.CDLL(None).dlinfo(handle, RTLD_DI_LINKMAP, ctypes.byref(found)) != 0:
        return LIBRARY.name
    return os.fsdecode(found.contents.l_name or LIBRARY.name)


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
