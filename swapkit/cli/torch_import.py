"""Calls a function when the process imports torch, and not before.

`swapkit run` does not import torch itself: scripts set variables such as OMP_NUM_THREADS and
CUDA_VISIBLE_DEVICES in their first lines, and torch reads them when it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_TORCH = "torch"


def when_torch_is_imported(call: Callable[[], None]) -> None:
    """Call a function right after the first import of torch, or now if torch was imported.

    The function runs on the importing thread, which holds the import lock of torch: it must not
    wait for another thread that imports torch. Its exceptions reach the import statement.
    """
    if _TORCH in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _TorchFinder(call))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as the other finders do, with a loader that makes the call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._asking = threading.local()  # another thread may import torch meanwhile

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - Python's interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return torch's spec. Libraries only ask for it, to see whether torch is installed."""
        if fullname != _TORCH or getattr(self._asking, "is_asking", False):
            return None
        self._asking.is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self)
        return spec

    def finish(self) -> None:
        """Make the call: torch is imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _TorchLoader(importlib.abc.Loader):
    """Loads torch, puts its own loader back, and reports."""

    def __init__(self, loader: importlib.abc.Loader, finder: _TorchFinder) -> None:
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
