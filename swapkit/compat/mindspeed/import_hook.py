"""Makes Python find MindSpeed's modules here, whether MindSpeed is installed or not."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING

from swapkit.compat.mindspeed.import_table import MODULES, ROOT, WITHOUT_COUNTERPART, advise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

_HERE = "swapkit.compat.mindspeed"


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
        if fullname.partition(".")[0] != ROOT:
            return None
        if not self._is_last:
            if fullname not in MODULES:
                return None
            return _make_spec(fullname)
        package, _, last = fullname.rpartition(".")
        inside_ours = _is_ours(package)
        known = (*MODULES, *WITHOUT_COUNTERPART) if inside_ours else tuple(MODULES)
        if _has_modules(fullname, known):
            return _make_spec(fullname)
        if inside_ours and package in MODULES:
            # Not the module's name: `from package import last` would ignore the error.
            raise ModuleNotFoundError(_describe_missing(package, last), name=package)
        if inside_ours or fullname in WITHOUT_COUNTERPART:
            raise ModuleNotFoundError(
                f"swapkit has no {fullname}. {advise(fullname)}", name=fullname
            )
        return None


def _has_modules(package: str, known: Iterable[str]) -> bool:
    return any(module.startswith(f"{package}.") for module in known)


def _make_spec(fullname: str) -> importlib.machinery.ModuleSpec:
    # A package, even without modules: only in packages do imports of unknown names reach a finder.
    return importlib.machinery.ModuleSpec(fullname, _LOADER, is_package=True)


def _is_ours(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module.__spec__, "loader", None) is _LOADER


_LOADER = _Loader()
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
    while _replaced:
        name = next(iter(_replaced))  # a package before its modules
        module = _replaced.pop(name)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)


def _detach(name: str, module: ModuleType) -> None:
    """Remove a module from its package's attributes, where an import would find it."""
    package, _, last = name.rpartition(".")
    owner = sys.modules.get(package)
    if owner is not None and vars(owner).get(last) is module:
        delattr(owner, last)
