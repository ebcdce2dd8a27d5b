"""Makes Python find MindSpeed's modules here, whether MindSpeed is installed or not."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import itertools
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# ---- import table --------------------------------------------------------------------------------
#
# Where swapkit provides MindSpeed's names, and what replaces those that it does not provide.
#
# Source:
#   MindSpeed, branches `core_r0.8.0` and `master`: the paths and the names.

ROOT = "mindspeed"
_MEMORY = f"{ROOT}.core.memory"
_SWAP, _ADAPT = f"{_MEMORY}.smart_swap", f"{_MEMORY}.adaptive"
_OURS = "swapkit.compat.mindspeed"


def _names(owner: str, *names: str, **renamed: str) -> dict[str, tuple[str, str]]:
    return {name: (owner, renamed.get(name, name)) for name in (*names, *renamed)}


_fsdp = functools.partial(_names, f"{_OURS}.fsdp_memory")
_manager = functools.partial(_names, f"{_OURS}.swap_manager")
_ACCEPT = "accept_module_class"
_CONFIGS = ("SwapPolicyConfig", "SwapPolicyPref", "swap_policy_config")
_PROFILES = ("ProfilerDataOneStep", "ProfilerOpInfo", "TensorInfoDetail")
_POLICIES = ("SwapPolicy", "SwapPolicyCandidate", "SwapStage", "SwapStageType")
# MindSpeed's module -> name -> (module, name) that provides it.
MODULES: dict[str, dict[str, tuple[str, str]]] = {
    f"{_ADAPT}_memory.adaptive_memory_function": _names("swapkit", "adapt_mem_func_wrapper"),
    f"{_ADAPT}_memory.adaptive_memory_opt": _manager(addup_allowed_mem_adapt_module=_ACCEPT),
    f"{_ADAPT}_recomputing.adaptive_recompute": _manager(
        allowed_recomputing_module_wrapper=_ACCEPT
    ),
    f"{_SWAP}.swap_policy_config": _names("swapkit.config.smart_swap", *_CONFIGS),
    f"{_SWAP}.swap_manager": _manager(SwapManager="start_swap_manager"),
    f"{_SWAP}.swap_cpp_adaptor": _names(f"{_OURS}.swap_policy", *_PROFILES, *_POLICIES),
}
for _package in (f"{ROOT}.fsdp.memory", f"{ROOT}.lite.memory"):
    MODULES |= {
        f"{_package}.recompute.recompute": _fsdp("recompute_modules"),
        f"{_package}.swap_activation.swap_activation": _fsdp("swap_activation_modules"),
        f"{_package}.swap_activation.tensor_swap_manager": _fsdp("TensorSwapContext"),
        f"{_package}.swap_optimizer": _fsdp("AdamWSwap"),
        f"{_package}.swap_optimizer.swap_optimizer": _fsdp("AdamWSwap"),
    }
# All provided names, as attributes of `swapkit.compat.mindspeed`.
PROVIDED = {name: where for names in MODULES.values() for name, where in names.items()}

BUDGET = "with swapkit.budget(limit, model, optimizer):"
_TRAIN = f"train inside `{BUDGET}`"
_TRACE = "read `session.trace` of `swapkit.budget`"
# Commonly imported modules that have no replacement here, each with an alternative.
WITHOUT_COUNTERPART = {
    f"{ROOT}.megatron_adaptor": "swapkit does not patch frameworks: call swapkit.install()",
    f"{_MEMORY}.adaptive_recomputing.swap_manager": f"{_TRAIN}, which rescues",
    f"{_MEMORY}.adaptive_recomputing.pluggable_allocator_adpator": "call swapkit.install()",
    f"{_MEMORY}.smart_swap.swap_engine": f"{_TRAIN} with policy='swap'",
    f"{_MEMORY}.memory_fragmentation.memory_recorder": (
        "swapkit's pool has no recorder: call swapkit.install(lifetimes=True)"
    ),
    f"{_MEMORY}.swap_attention.prefetch": "use swapkit.offload(model, pattern)",
    f"{ROOT}.core.optimizer.swap_optimizer.swap_optimizer": "use swapkit.offload(optimizer)",
}
# Names that have no replacement, each with an alternative.
NAMES_WITHOUT_COUNTERPART = {
    "NPUSwapManager": (
        "this is a C++ class: swapkit's C++ header has its hooks (BeginHook, TensorHook, PostHook, "
        "EndHook) for custom operators. In Python, operators that torch dispatches need no hooks; "
        "announce other kernels by swapkit.op"
    ),
    "AsyncSwapHandler": "use TensorSwapContext or `with swapkit.offload():`",
    "PolicyResult": f"{_TRAIN}; `session.save_plan(path)` writes the plan",
    "ProfilerSwapInfo": f"{_TRAIN}; `session.stats` counts its copies",
    "SwapConfig": f"{_TRAIN}; its arguments and swap_policy_config replace this state",
    "SwapEngine": f"{_TRAIN} with policy='swap', or an object with plan(trace, machine)",
    "SwapOptimizerOperate": "use swapkit.offload(optimizer)",
    "get_smart_swap_cpp": f"{_TRAIN}; swapkit has no such extension",
    "ProfilerLayerInfo": _TRACE,
    "record_tensor_ptr_with_types": "swapkit identifies states and buffers without help",
}


def advise(path: str, name: str = "") -> str:
    """Return a sentence with an alternative to a module, or to a name in it."""
    instead = NAMES_WITHOUT_COUNTERPART.get(name) or WITHOUT_COUNTERPART.get(path, _TRAIN)
    return f"{instead[0].upper()}{instead[1:]}. {_OURS}.MODULES lists the names that it has."


# ---- import hook ---------------------------------------------------------------------------------
#
# Makes Python find MindSpeed's modules here, whether MindSpeed is installed or not.


class _Loader(importlib.abc.Loader):
    """Loader of a module that resolves its names on access, or of an empty package."""

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__
        names = MODULES.get(path)
        module.__doc__ = f"Stands in for {path}: see {_OURS}."
        if names is None:
            return

        def find(name: str) -> object:
            if name in names:
                owner, attribute = names[name]
                return getattr(importlib.import_module(owner), attribute)
            if f"{path}.{name}" in MODULES:  # `from package import module`
                return importlib.import_module(f"{path}.{name}")
            # Python and pickle probe all modules for names. `from path import name` next looks
            # for a module of that name: `_ModuleFinder` raises an ImportError with the same text.
            raise AttributeError(_describe_missing(path, name), name=name, obj=module)

        module.__dict__["__getattr__"] = find
        module.__dict__["__dir__"] = lambda: sorted(names)
        module.__dict__["__all__"] = sorted(names)


def _describe_missing(path: str, name: str) -> str:
    """Return a sentence about a name that a replaced module lacks."""
    has = ", ".join(sorted(MODULES[path]))
    return f"{path} has no {name!r} in swapkit; it has {has}. {advise(path, name)}"


def _has_modules(package: str, *paths: Iterable[str]) -> bool:
    return any(path.startswith(f"{package}.") for path in itertools.chain(*paths))


class _ModuleFinder(importlib.abc.MetaPathFinder):
    """Finder of replaced modules, and of their packages if no other finder has them."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def find_spec(self, fullname: str, *_args: Any, **_more: Any) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        if not self._is_last:
            return _make_spec(fullname) if fullname in MODULES else None
        package, _, last = fullname.rpartition(".")
        inside_ours = _is_ours(package)
        if _has_modules(fullname, MODULES, WITHOUT_COUNTERPART if inside_ours else ()):
            return _make_spec(fullname)
        if inside_ours and package in MODULES:
            # Not the module's name: `from package import last` would ignore the error.
            raise ModuleNotFoundError(_describe_missing(package, last), name=package)
        if inside_ours or fullname in WITHOUT_COUNTERPART:
            text = f"swapkit has no {fullname}. {advise(fullname)}"
            raise ModuleNotFoundError(text, name=fullname)
        return None


def _is_ours(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module.__spec__, "loader", None) is _LOADER


_LOADER = _Loader()
# A package, even without modules: only in packages do imports of unknown names reach a finder.
_make_spec = functools.partial(ModuleSpec, loader=_LOADER, is_package=True)
_FIRST, _LAST = _ModuleFinder(is_last=False), _ModuleFinder(is_last=True)
_replaced: dict[str, ModuleType] = {}  # the original modules, by path


def install() -> None:
    """Start to provide MindSpeed's paths; importing `swapkit.compat.mindspeed` calls this."""
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
    for name in [name for name in sys.modules if name.partition(".")[0] == ROOT]:
        if _is_ours(name):
            _detach(name, sys.modules.pop(name))
    for name, module in _replaced.items():  # a package before its modules
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)
    _replaced.clear()


def _detach(name: str, module: ModuleType) -> None:
    """Remove a module from its package's attributes, where an import would find it."""
    package, _, last = name.rpartition(".")
    owner = sys.modules.get(package)
    if owner is not None and vars(owner).get(last) is module:
        delattr(owner, last)
