"""swapkit: train PyTorch models inside a memory budget.

    import swapkit

    swapkit.install()                                   # before the model is built
    with swapkit.budget("10GiB", model, optimizer) as session:
        for batch in loader:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(session.stats)

Importing swapkit does not import torch; the names below do when they are first used. All errors are
in `swapkit.errors`; `SwapkitError` is their root.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from swapkit.errors import SwapkitError

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installation import install, uninstall
    from swapkit._runtime.session.session import sessions
    from swapkit.api.arguments import add_arguments, from_arguments
    from swapkit.api.choosing import choices
    from swapkit.api.configuration import configure
    from swapkit.api.contexts import budget
    from swapkit.api.functions import adapt_mem_func_wrapper
    from swapkit.api.operators import op
    from swapkit.api.planning import plan, simulate
    from swapkit.api.recording import record
    from swapkit.api.regions import checkpoint
    from swapkit.api.scopes import keep, offload
    from swapkit.api.statistics import memory_stats, memory_summary, reset_peak_memory_stats

__version__ = "0.1.0"

__all__ = [
    "SwapkitError",
    "adapt_mem_func_wrapper",
    "add_arguments",
    "budget",
    "checkpoint",
    "choices",
    "configure",
    "from_arguments",
    "install",
    "keep",
    "memory_stats",
    "memory_summary",
    "offload",
    "op",
    "plan",
    "record",
    "reset_peak_memory_stats",
    "sessions",
    "simulate",
    "uninstall",
]

_LAZY = {
    "adapt_mem_func_wrapper": "swapkit.api.functions",
    "add_arguments": "swapkit.api.arguments",
    "budget": "swapkit.api.contexts",
    "checkpoint": "swapkit.api.regions",
    "choices": "swapkit.api.choosing",
    "configure": "swapkit.api.configuration",
    "from_arguments": "swapkit.api.arguments",
    "install": "swapkit._runtime.allocators.installation",
    "keep": "swapkit.api.scopes",
    "memory_stats": "swapkit.api.statistics",
    "memory_summary": "swapkit.api.statistics",
    "offload": "swapkit.api.scopes",
    "op": "swapkit.api.operators",
    "plan": "swapkit.api.planning",
    "record": "swapkit.api.recording",
    "reset_peak_memory_stats": "swapkit.api.statistics",
    "sessions": "swapkit._runtime.session.session",
    "simulate": "swapkit.api.planning",
    "uninstall": "swapkit._runtime.allocators.installation",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'swapkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
