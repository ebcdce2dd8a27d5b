"""Calls a function when the process imports a module, and not before."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call a function right after the first import of a module, or now if it was imported.

    The function runs on the importing thread, which holds the import lock of the module: it must
    not wait for another thread that imports the module. Its exceptions reach the import statement.
    """
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _ImportFinder(name, call))


class _ImportFinder(importlib.abc.MetaPathFinder):
    """Finds the module as the other finders do, with a loader that makes the call."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call
        self._asking = threading.local()  # another thread may import the module meanwhile

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - Python's interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the module's spec. Libraries only ask for it, to see whether it is installed."""
        if fullname != self._name or getattr(self._asking, "is_asking", False):
            return None
        self._asking.is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ImportLoader(spec.loader, self)
        return spec

    def finish(self) -> None:
        """Make the call: the module is imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _ImportLoader(importlib.abc.Loader):
    """Loads the module, puts its own loader back, and reports."""

    def __init__(self, loader: importlib.abc.Loader, finder: _ImportFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.finish()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
