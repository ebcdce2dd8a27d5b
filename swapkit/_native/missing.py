"""The error text for a missing compiled core."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HOW = "gcc compiles it when swapkit is installed"


def explain_missing(root: Path, error: ImportError) -> str:
    """Return the reason why the core cannot be loaded, and what to do.

    Args:
        root: the folder that holds the package that was imported.
        error: the error of the core's import.
    """
    head = f"swapkit's compiled core could not be loaded ({error}). {_HOW}"
    if not (root / "build_native.py").exists():
        return f"{head}: run `pip install --force-reinstall swapkit`, with gcc available."
    checkout = f"Python imported swapkit from a checkout, {root}, which has no compiled core"
    elsewhere = _find_installed()
    if elsewhere is not None and elsewhere != root:
        return (
            f"{head}. {checkout}; an installed swapkit with a core is in {elsewhere}. Start Python "
            "in another folder to use it, or run `make setup` (or `pip install -e .`) to compile "
            "the core of the checkout."
        )
    return (
        f"{head}. {checkout}: run `make setup` (or `pip install -e .`) there. `pip install .` "
        "installs a copy elsewhere, for use from any other folder."
    )


def _find_installed() -> Path | None:
    """Return the site-packages folder of a swapkit with its compiled core, if any."""
    for distribution in metadata.distributions(name="swapkit"):
        for file in distribution.files or ():
            if file.name.startswith("_lib.") and file.suffix == ".so":
                return distribution.locate_file("")  # type: ignore[return-value]
    return None
