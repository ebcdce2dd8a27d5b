"""Registration with torch's compilers: once they are imported, and not before."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from swapkit._runtime.compiled.missing_names import report_missing
from swapkit._runtime.torch_compat.dispatch_modes import renew_behind_compiled_calls
from swapkit.imports import when_imported

SWITCH = "SWAPKIT_COMPILE"  # 0: compiled graphs stay as torch makes them
# What a program imports that uses a compiler, and the function of `partitioner.py` to call then.
COMPILERS = {
    "torch._inductor.config": "register_inductor",
    "torch._dynamo.backends.common": "register_dynamo",
}


def watch_compilers(swapping: Callable[..., AbstractContextManager[object]]) -> None:
    """Let compilers that were imported, or will be, move the hooks into their graphs.

    Args:
        swapping: returns hooks that move what autograd saves on a tensor's device to the host.
    """
    when_imported("torch._dynamo.eval_frame", renew_behind_compiled_calls)
    if is_on():
        for compiler, name in COMPILERS.items():
            when_imported(compiler, functools.partial(_register, name, swapping))


def is_on() -> bool:
    """Return whether the program has not switched this off."""
    return os.environ.get(SWITCH, "").strip() != "0"


def _register(name: str, swapping: object) -> None:
    try:
        from swapkit._runtime.compiled import partitioner

        getattr(partitioner, name)(swapping)
    except (AttributeError, ImportError) as error:
        report_missing(error)
