"""Which module is running: names for saved tensors and for the holders of memory.

While a tracker is on, hooks around every module's forward keep a stack per thread and label the
blocks that the thread takes with the module's number. A module's name is its path in the model it
was first seen in; a shared module keeps its first path.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch.nn.modules import module as module_hooks

from swapkit._native.pool import set_tag

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

NO_MODULE = 0
# Added to a module's tag for what its backward takes.
BACKWARD = 1 << 31


class _Stack(threading.local):
    """Numbers of the modules whose forward is running on this thread, outermost first."""

    def __init__(self) -> None:
        self.tags: list[int] = []
        self.period = 0


class ModuleTracker:
    """Names for the modules that run. A tag stands for a name; 0 means: no module."""

    def __init__(self) -> None:
        self._names: list[str] = [""]
        self._tag_of_name: dict[str, int] = {"": NO_MODULE}
        self._tags: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._stack = _Stack()
        self._period = 0  # of tracking; what a thread's stack holds from an earlier one is stale
        self._handles: list[RemovableHandle] = []
        self._users = 0
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start labelling; calls nest."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._period += 1
                self._handles = [
                    module_hooks.register_module_forward_pre_hook(self._enter),
                    module_hooks.register_module_forward_hook(self._leave, always_call=True),
                ]

    def stop(self) -> None:
        """Undo one `start`."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for handle in self._handles:
                    handle.remove()
                self._handles = []
                set_tag(NO_MODULE)

    @property
    def is_on(self) -> bool:
        """Whether what is taken is being labelled."""
        return self._users > 0

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of a model by their paths in it."""
        for path, module in model.named_modules():
            if module not in self._tags:
                self._add(module, path or type(module).__name__)

    def name(self, tag: int) -> str:
        """Return the path of the module with this tag, or empty text; `BACKWARD` is ignored."""
        index = tag & ~BACKWARD
        return self._names[index] if index < len(self._names) else ""

    def modules(self) -> list[torch.nn.Module]:
        """Return every named module that still exists."""
        return list(self._tags)

    def current(self) -> int:
        """Return the tag of the module whose forward runs on this thread."""
        tags = self._running()
        return tags[-1] if tags else NO_MODULE

    def _running(self) -> list[int]:
        stack = self._stack
        if stack.period != self._period:
            stack.tags, stack.period = [], self._period
        return stack.tags

    def _enter(self, module: torch.nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        tag = self._tags.get(module)
        if tag is None:
            tag = self._name_now(module)
        self._running().append(tag)
        set_tag(tag)

    def _leave(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        if torch.compiler.is_compiling():
            return
        tags = self._running()
        if tags:  # empty if tracking began inside this module
            tags.pop()
        set_tag(tags[-1] if tags else NO_MODULE)

    def _name_now(self, module: torch.nn.Module) -> int:
        """Name a module first seen now: the root of a model, or one that is in no model known."""
        outer = self.current()
        if outer == NO_MODULE:
            self.add_model(module)
            return self._tags[module]
        return self._add(module, f"{self._names[outer]}.{type(module).__name__}")

    def _add(self, module: torch.nn.Module, name: str) -> int:
        with self._lock:
            tag = self._tag_of_name.get(name)
            if tag is None:
                tag = self._tag_of_name[name] = len(self._names)
                self._names.append(name)
            self._tags[module] = tag
            return tag
