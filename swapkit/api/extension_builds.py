"""Where operators in C and C++ find swapkit's headers and its library of hooks."""

from __future__ import annotations

from swapkit._native import hooks


def include_path(*, compat: bool = False) -> str:
    """Return the folder of the headers: `swapkit.hpp` for C++, `swapkit.h` for C.

    Args:
        compat: return instead the folder of `NPUSwapManager.h`. With it on the include path,
            operators with the hooks of MindSpeed's SmartSwap compile unchanged.

    Example:
        >>> import os, swapkit
        >>> os.path.exists(os.path.join(swapkit.include_path(), "swapkit.hpp"))
        True
    """
    return str(hooks.COMPAT if compat else hooks.INCLUDE)


def library_path() -> str:
    """Return the folder of `libswapkit.so`, which operators with hooks link with (`-lswapkit`).

    The library needs neither Python nor torch. Where swapkit does not run, its functions return at
    once.

    Example:
        >>> import os, swapkit
        >>> os.path.exists(os.path.join(swapkit.library_path(), "libswapkit.so"))
        True
    """
    return str(hooks.FOLDER)
