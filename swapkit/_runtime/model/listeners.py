"""The listeners of one set of torch's global hooks, and when torch has the hooks.

Torch calls global hooks on every thread while it iterates over its tables of hooks. Adding or
removing a hook breaks the iteration of another thread ("OrderedDict mutated during iteration",
raised in that thread's `optimizer.step()`). So there is one set of hooks. The first listener adds
the set. Removing the last listener removes the set: a table that holds no other hook is replaced by
an empty one, which breaks no iteration. If a table holds hooks of others, whose handles refer to
the table, the set is removed only if every other thread waits and no thread iterates. Otherwise
the set stays, without effect, until a later removal.

Adding another listener does not touch torch's tables: the listeners are in a tuple that is replaced
as a whole.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from itertools import pairwise
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from swapkit._runtime.model import hook_bypass
from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.torch_compat.internals import MODULE_CALL, forget_removed_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType, ModuleType

_Listener = TypeVar("_Listener")


class Listeners(Generic[_Listener]):
    """The listeners of one set of torch's hooks. Safe to use from any thread."""

    def __init__(
        self,
        torchs: ModuleType,
        hooks: Mapping[str, Callable[..., Any]],
        register: Callable[[], object],
    ) -> None:
        """Create an empty set.

        An interruption may come at any point. So a hook is looked up in its table, not by a handle,
        and an incomplete set of hooks is removed before a new one is registered.

        Args:
            torchs: torch's module with the tables of hooks.
            hooks: the hook for each table, by the table's name.
            register: registers the hooks with torch.
        """
        self.now: tuple[_Listener, ...] = ()
        self._torchs = torchs
        self._hooks = hooks
        self._register = register
        self._is_installed = False  # all hooks
        # Reentrant: a finalizer may remove a listener during another change.
        self._lock = make_fork_lock()

    def add(self, listener: _Listener) -> None:
        """Add a listener, after the existing ones."""
        with self._lock:
            if listener not in self.now:  # else an interruption left the listener here
                self.now = (*self.now, listener)
            hook_bypass.interrupt()
            if not self._is_installed:
                self._take_off()
                self._register()
                self._is_installed = True

    def prepare_bypass(self) -> bool:
        """Return whether torch can skip the hooks on a thread that bypasses them."""
        with self._lock:
            # With other hooks, torch takes the slow path for them anyway.
            return self._is_installed and self.are_alone() and hook_bypass.install()

    def remove(self, listener: _Listener) -> None:
        """Remove a listener; do nothing if the listener is unknown."""
        with self._lock:
            self.now = tuple(other for other in self.now if other is not listener)
            hook_bypass.interrupt()
            if not self.now and self._can_take_off():
                self._take_off()

    def are_alone(self) -> bool:
        """Return whether torch's tables hold no hooks of others."""
        return all(
            each is hook
            for name, hook in self._hooks.items()
            for each in list(getattr(self._torchs, name).values())
        )

    def _can_take_off(self) -> bool:
        if self.are_alone():  # the tables are replaced
            return not hook_bypass.may_register()
        return threads.others_wait() and not _are_called()

    def _take_off(self) -> None:
        """Remove our hooks from torch's tables."""
        self._is_installed = False
        for name, hook in self._hooks.items():
            table = getattr(self._torchs, name)
            ours = [number for number, each in list(table.items()) if each is hook]
            if len(ours) < len(table):
                for number in ours:
                    del table[number]
            elif ours:  # keep the table unchanged: a thread may iterate over it
                setattr(self._torchs, name, OrderedDict())
        forget_removed_hooks()


# The function in which torch calls the step hooks of every optimizer class.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def running_steps(frame: FrameType | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose steps are on the stack of a frame, innermost first."""
    found = []
    while frame is not None:
        if frame.f_code is _STEP and "self" in frame.f_locals:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


# With hooks, torch calls `forward` in this nested function of a module's call. Outside of it, torch
# iterates over the hooks of a forward that raised.
_CALL_FORWARD = next(
    each for each in MODULE_CALL.co_consts if isinstance(each, CodeType) and each.co_name == "inner"
)


def _are_called() -> bool:
    """Return whether some thread may be iterating over torch's tables of hooks.

    This can be the current thread, if a session ends in a hook, or one that waits in a hook.
    """
    here: list[CodeType] = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        here.append(frame.f_code)
        frame = frame.f_back
    stacks = [here, *([code for code, _ in stack] for stack in threads.stacks())]
    return any(
        caller is _STEP or (caller is MODULE_CALL and called is not _CALL_FORWARD)
        for stack in stacks
        for called, caller in pairwise(stack)
    )
