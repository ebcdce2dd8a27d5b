"""In which call of which module the operators of a recorded step run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.nn.modules import module as module_hooks

from swapkit._runtime.tracking import NO_MODULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from swapkit._runtime.tracking import ModuleTracker
    from swapkit.ir.traces import Phase

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001
_NO_TASK = -1


class _Call:
    """One call of a module, and how often each operator has run in it."""

    __slots__ = ("counts", "module")

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.module = module
        self.counts: dict[tuple[Phase, int, str], int] = {}


class _Thread(threading.local):
    """The calls that run on a thread, innermost last; at the bottom none of a module."""

    def __init__(self) -> None:
        self.calls = [_Call(None)]


class Calls:
    """The calls of modules while a step is recorded."""

    def __init__(
        self,
        tracker: ModuleTracker,
        root: torch.nn.Module | None,
        meet: Callable[[torch.nn.Module], None],
    ) -> None:
        """Know no call. `meet` is called with each module that is called for the first time."""
        self.tracker = tracker
        self.root = root  # None: the first module that is called
        self.root_calls = 0  # so far, where autograd saw them
        self._meet = meet
        self._met: set[int] = set()
        self._thread = _Thread()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Begin to name modules, and to see their calls."""
        self.tracker.start()
        # After the tracker's: it has named the module by then.
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Undo `start`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.tracker.stop()
        del self._meet  # of who has this

    def enter(self, module: torch.nn.Module) -> None:
        """Note that a module runs whose call began before `start`."""
        self._enter(module, ())

    @property
    def is_inside(self) -> bool:
        """Whether a module runs on this thread."""
        return len(self._thread.calls) > 1

    def count(self, name: str, phase: Phase) -> tuple[int, int]:
        """Count an operator; return its module's tag, and how many of it ran before in the call."""
        tag = self.tracker.current()
        counts = self._thread.calls[-1].counts
        key = phase, tag, name
        occurrence = counts.get(key, 0)
        counts[key] = occurrence + 1
        return tag, occurrence

    def site(self) -> tuple[str, int]:
        """Return where something is saved for the first time now, as the tracker names it."""
        tag, index = self.tracker.site()
        return ("" if tag == NO_MODULE else self.tracker.name(tag)), index

    def _enter(self, module: torch.nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if id(module) not in self._met:
            self._met.add(id(module))
            self._meet(module)
        calls = self._thread.calls
        if torch.is_grad_enabled() and _graph_task() == _NO_TASK:
            if self.root is None and len(calls) == 1:
                self.root = module
            if module is self.root and all(call.module is not module for call in calls):
                self.root_calls += 1
        calls.append(_Call(module))

    def _leave(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        if not torch.compiler.is_compiling() and self.is_inside:
            self._thread.calls.pop()
