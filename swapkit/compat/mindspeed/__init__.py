"""The import paths of MindSpeed's memory features, provided by swapkit.

    import swapkit.compat.mindspeed

makes imports such as `from mindspeed.core.memory.adaptive_memory.adaptive_memory_function import
adapt_mem_func_wrapper` work, whether MindSpeed is installed or not. `MODULES` lists the replaced
modules; all other modules of an installed MindSpeed stay unchanged. `uninstall()` undoes this,
`install()` restores it. The provided names are attributes of this package, too.

Names without a counterpart raise an ImportError that names an alternative.

Source:
    MindSpeed: the paths, the names, and their arguments.
"""

from __future__ import annotations

import importlib

from swapkit.compat.mindspeed.import_hook import (
    MODULES,
    NAMES_WITHOUT_COUNTERPART,
    PROVIDED,
    WITHOUT_COUNTERPART,
    advise,
    install,
    uninstall,
)
from swapkit.config.smart_swap import SwapPolicyConfig, SwapPolicyPref, swap_policy_config


def __getattr__(name: str) -> object:
    """Return a name of MindSpeed's memory features.

    Raises:
        AttributeError: MindSpeed has no such name, or not one that swapkit knows.
        ImportError: swapkit does not provide it; the message names an alternative.
    """
    if name in PROVIDED:
        owner, attribute = PROVIDED[name]
        return getattr(importlib.import_module(owner), attribute)
    if name in NAMES_WITHOUT_COUNTERPART:
        raise ImportError(f"swapkit has no {name!r}. {advise(__name__, name)}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()

__all__ = [
    "MODULES",
    "WITHOUT_COUNTERPART",
    "SwapPolicyConfig",
    "SwapPolicyPref",
    "install",
    "swap_policy_config",
    "uninstall",
]
