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

Importing swapkit does not import torch; the first use of a public name does. All errors are in
`swapkit.errors`; `SwapkitError` is their root.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from swapkit.errors import SwapkitError

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installation import install, uninstall
    from swapkit._runtime.session.session import sessions
    from swapkit.api.autograd_functions import adapt_mem_func_wrapper
    from swapkit.api.budgets import budget
    from swapkit.api.checkpointing import checkpoint
    from swapkit.api.choice_table import choices
    from swapkit.api.command_line import add_arguments, from_arguments
    from swapkit.api.configuration import configure
    from swapkit.api.custom_kernels import include_path, library_path, op
    from swapkit.api.estimation import estimate
    from swapkit.api.memory_statistics import memory_stats, memory_summary, reset_peak_memory_stats
    from swapkit.api.offloading import keep, offload
    from swapkit.api.planning import plan, simulate
    from swapkit.api.recording import record

__version__ = "0.1.0"

__all__ = [
    "SwapkitError",
    "adapt_mem_func_wrapper",
    "add_arguments",
    "budget",
    "checkpoint",
    "choices",
    "configure",
    "estimate",
    "from_arguments",
    "include_path",
    "install",
    "keep",
    "library_path",
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

_MODULES = {  # by path below swapkit: the public names that each has
    "_runtime.allocators.installation": "install uninstall",
    "_runtime.session.session": "sessions",
    "api.autograd_functions": "adapt_mem_func_wrapper",
    "api.budgets": "budget",
    "api.checkpointing": "checkpoint",
    "api.choice_table": "choices",
    "api.command_line": "add_arguments from_arguments",
    "api.configuration": "configure",
    "api.custom_kernels": "include_path library_path op",
    "api.estimation": "estimate",
    "api.memory_statistics": "memory_stats memory_summary reset_peak_memory_stats",
    "api.offloading": "keep offload",
    "api.planning": "plan simulate",
    "api.recording": "record",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'swapkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"swapkit.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
