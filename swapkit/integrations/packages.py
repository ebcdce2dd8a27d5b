"""The frameworks that integrations need: none of them is a dependency of swapkit."""

from __future__ import annotations

import importlib.util


def require(package: str, wanted_by: str, *others: str) -> str:
    """Return the name of the first installed package of those that serve equally well.

    Args:
        package: the package to advise.
        wanted_by: the module that needs it.
        others: packages that serve as well.

    Raises:
        ImportError: none is installed.
    """
    for name in (package, *others):
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError(
        f"{wanted_by} needs {package}, which is not installed: pip install {package}", name=package
    )
