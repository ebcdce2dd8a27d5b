"""The module call in which each operator of a recorded step runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.tracker import NO_MODULE, ModuleTracker, parts_of
from swapkit._runtime.torch_compat.dispatch_modes import renew
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit.ir.traces import Phase


class _RunningCall:
    """One call of a module, with a count of each operator that ran in it."""

    __slots__ = ("counts", "module")

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.module = module
        self.counts: dict[tuple[Phase, int, str], int] = {}


class _ThreadCalls(threading.local):
    """The calls that run on a thread, innermost last; the bottom entry stands for no module."""

    def __init__(self) -> None:
        self.calls = [_RunningCall(None)]


class Calls:
    """The module calls of a recorded step, on the recorded threads."""

    may_bypass = False

    def __init__(
        self,
        tracker: ModuleTracker,
        root: torch.nn.Module | None,
        meet: Callable[[torch.nn.Module], None],
        is_here: Callable[[], bool],
    ) -> None:
        """Start without calls.

        Args:
            tracker: names modules.
            root: the model; None: the first module that is called.
            meet: called with each module on its first call.
            is_here: whether the current thread is recorded; other threads train other models.
        """
        self.tracker = tracker
        self.root = root
        # The calls so far, in forward with gradients enabled, of the part that was called last.
        self.root_calls = 0
        self._calls_of: dict[int, int] = {}  # by `id` of a part
        self._meet: Callable[[torch.nn.Module], None] | None = meet
        self._is_here: Callable[[], bool] | None = is_here
        self._met: set[int] = set()
        self._thread = _ThreadCalls()
        self._user = object()  # the tracker holds this, not `self`, and so keeps nothing alive

    def start(self) -> None:
        """Start to name modules and to see their calls."""
        self.tracker.start(self._user)
        global_hooks.calls.add(self)  # after the tracker, so that the module has a name

    def stop(self) -> None:
        """Undo `start`."""
        global_hooks.calls.remove(self)
        self.tracker.stop(self._user)
        self._meet = self._is_here = None  # break the cycle with the owner

    @property
    def is_inside(self) -> bool:
        """Whether a module runs on this thread."""
        return len(self._thread.calls) > 1

    def count(self, name: str, phase: Phase) -> tuple[int, int]:
        """Count an operator; return its module's tag and its number of earlier runs in the call."""
        tag = self.tracker.current()
        counts = self._thread.calls[-1].counts
        key = phase, tag, name
        occurrence = counts.get(key, 0)
        counts[key] = occurrence + 1
        return tag, occurrence

    def site(self) -> tuple[str, int]:
        """Return the site of a tensor that is saved for the first time now (module, index)."""
        tag, index = self.tracker.site()
        return ("" if tag == NO_MODULE else self.tracker.name(tag)), index

    def enter(self, module: torch.nn.Module) -> None:
        """Note that a module's forward runs on this thread; it may have begun earlier."""
        meet, is_here = self._meet, self._is_here  # read once: another thread may call `stop`
        if meet is None or is_here is None or not is_here():
            return
        renew()
        if id(module) not in self._met:
            self._met.add(id(module))
            meet(module)
        self._count_root(module)
        self._thread.calls.append(_RunningCall(module))

    def _count_root(self, module: torch.nn.Module) -> None:
        calls = self._thread.calls
        if torch.is_grad_enabled() and graph_task() == NO_TASK:
            if self.root is None and len(calls) == 1:
                self.root = module
            roots = () if self.root is None else parts_of(self.root)
            is_root = any(module is each for each in roots)
            if is_root and all(call.module is not module for call in calls):
                self.root_calls = self._calls_of.get(id(module), 0) + 1
                self._calls_of[id(module)] = self.root_calls

    def leave(self, _module: torch.nn.Module) -> None:
        """Note that the innermost module's forward has ended on this thread."""
        if self.is_inside:
            self._thread.calls.pop()
