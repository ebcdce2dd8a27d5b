"""Where torch's compilers call swapkit: once they are imported, and not before."""

from __future__ import annotations

import os

from swapkit._runtime.compiled.missing_names import warn_of
from swapkit.imports import when_imported

SWITCH = "SWAPKIT_COMPILE"  # 0: compiled graphs stay as torch makes them


def watch_compilers() -> None:
    """Let compilers that were imported, or will be, move the hooks into their graphs."""
    if os.environ.get(SWITCH, "").strip() != "0":
        when_imported("torch._inductor.config", lambda: _open("open_inductor"))
        when_imported("torch._dynamo.backends.common", lambda: _open("open_dynamo"))


def _open(door: str) -> None:
    try:
        from swapkit._runtime.compiled import partitioner

        getattr(partitioner, door)()
    except (AttributeError, ImportError) as error:
        warn_of(error)
