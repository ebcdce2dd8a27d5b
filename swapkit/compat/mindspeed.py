"""The import paths of MindSpeed's memory features, provided by swapkit.

    import swapkit.compat.mindspeed

makes imports such as `from mindspeed.core.memory.adaptive_memory.adaptive_memory_function import
adapt_mem_func_wrapper` work, whether MindSpeed is installed or not. `MODULES` lists the replaced
modules; all other modules of an installed MindSpeed stay unchanged. `uninstall()` undoes this,
`install()` restores it.

Names without a counterpart raise an ImportError that names an alternative.

Source:
    MindSpeed: the paths, the names, and their arguments.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING

from swapkit.config.smart_swap import SwapPolicyConfig, SwapPolicyPref, swap_policy_config
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_ROOT = "mindspeed"
_MEMORY = f"{_ROOT}.core.memory"


def accept_module_class(module_class: type) -> None:
    """Do nothing: MindSpeed needs to know the layers that it may plan for; swapkit plans for all.

    Args:
        module_class: class of the layers.

    Raises:
        InvalidArgument: `module_class` is not a class.
    """
    if not isinstance(module_class, type):
        raise InvalidArgument(f"{module_class!r}: expected a module class")


# MindSpeed module -> name -> (module, name) that provides it.
_HERE = __name__
MODULES: dict[str, dict[str, tuple[str, str]]] = {
    f"{_MEMORY}.adaptive_memory.adaptive_memory_function": {
        "adapt_mem_func_wrapper": ("swapkit", "adapt_mem_func_wrapper"),
    },
    f"{_MEMORY}.adaptive_memory.adaptive_memory_opt": {
        "addup_allowed_mem_adapt_module": (_HERE, "accept_module_class"),
    },
    f"{_MEMORY}.adaptive_recomputing.adaptive_recompute": {
        "allowed_recomputing_module_wrapper": (_HERE, "accept_module_class"),
    },
    f"{_MEMORY}.smart_swap.swap_policy_config": {
        "SwapPolicyConfig": (_HERE, "SwapPolicyConfig"),
        "SwapPolicyPref": (_HERE, "SwapPolicyPref"),
        "swap_policy_config": (_HERE, "swap_policy_config"),
    },
}
_BUDGET = "with swapkit.budget(limit, model, optimizer):"
# Commonly imported modules that have no replacement here, each with an alternative.
WITHOUT_COUNTERPART = {
    f"{_ROOT}.megatron_adaptor": "swapkit does not patch frameworks: call swapkit.install()",
    f"{_MEMORY}.adaptive_recomputing.swap_manager": f"train inside `{_BUDGET}`, which rescues",
    f"{_MEMORY}.adaptive_recomputing.pluggable_allocator_adpator": "call swapkit.install()",
    f"{_MEMORY}.smart_swap.swap_manager": f"train inside `{_BUDGET}` with policy='swap'",
    f"{_MEMORY}.smart_swap.swap_engine": f"train inside `{_BUDGET}` with policy='swap'",
    f"{_MEMORY}.memory_fragmentation.memory_recorder": (
        "swapkit's pool has no recorder: call swapkit.install()"
    ),
    f"{_MEMORY}.swap_attention.prefetch": "use swapkit.offload(model, pattern)",
    f"{_ROOT}.fsdp.memory.recompute.recompute": "use swapkit.checkpoint(model, pattern)",
}


class _Loader(importlib.abc.Loader):
    """Loader of a module that resolves its names on access, or of an empty package."""

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__
        names = MODULES.get(path)
        module.__doc__ = f"Stands in for {path}: see {_HERE}."
        if names is None:
            return

        def find(name: str) -> object:
            if name in names:
                owner, attribute = names[name]
                return getattr(importlib.import_module(owner), attribute)
            text = f"{path} has no {name!r} in swapkit; it has {', '.join(sorted(names))}"
            if name.startswith("__"):  # Python itself probes for optional dunder names
                raise AttributeError(text)
            raise ImportError(f"{text}. {_advise(path)}", name=path)

        module.__dict__["__getattr__"] = find
        module.__dict__["__dir__"] = lambda: sorted(names)


class _ModuleFinder(importlib.abc.MetaPathFinder):
    """Finder of replaced modules, and of their packages if no other finder has them."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - Python's interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _ROOT:
            return None
        if not self._is_last:
            return _make_spec(fullname) if fullname in MODULES else None
        inside_ours = _is_ours(fullname.rpartition(".")[0])
        known = (*MODULES, *WITHOUT_COUNTERPART) if inside_ours else tuple(MODULES)
        if any(module.startswith(f"{fullname}.") for module in known):
            return _make_spec(fullname, is_package=True)
        if inside_ours or fullname in WITHOUT_COUNTERPART:
            raise ModuleNotFoundError(
                f"swapkit has no {fullname}. {_advise(fullname)}", name=fullname
            )
        return None


def _make_spec(fullname: str, *, is_package: bool = False) -> importlib.machinery.ModuleSpec:
    return importlib.machinery.ModuleSpec(fullname, _LOADER, is_package=is_package)


def _advise(path: str) -> str:
    instead = WITHOUT_COUNTERPART.get(path, f"Train inside `{_BUDGET}`")
    return f"{instead[0].upper()}{instead[1:]}; {_HERE} has {', '.join(sorted(MODULES))}"


def _is_ours(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module.__spec__, "loader", None) is _LOADER


_LOADER = _Loader()
_FIRST, _LAST = _ModuleFinder(is_last=False), _ModuleFinder(is_last=True)
_replaced: dict[str, ModuleType] = {}  # the original modules, by path


def install() -> None:
    """Start to provide MindSpeed's paths; importing this module calls this function."""
    if _FIRST in sys.meta_path:
        return
    for name in MODULES:
        if name in sys.modules:
            _replaced[name] = sys.modules.pop(name)
            _detach(name, _replaced[name])
    sys.meta_path.insert(0, _FIRST)
    sys.meta_path.append(_LAST)


def uninstall() -> None:
    """Undo `install` and restore an installed MindSpeed; names already imported keep working."""
    for finder in (_FIRST, _LAST):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] == _ROOT]:
        if _is_ours(name):
            _detach(name, sys.modules.pop(name))
    while _replaced:
        name, module = _replaced.popitem()
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)


def _detach(name: str, module: ModuleType) -> None:
    """Remove a module from its package's attributes, where an import would find it."""
    package, _, last = name.rpartition(".")
    owner = sys.modules.get(package)
    if owner is not None and vars(owner).get(last) is module:
        delattr(owner, last)


install()

__all__ = ["SwapPolicyConfig", "SwapPolicyPref", "install", "swap_policy_config", "uninstall"]
