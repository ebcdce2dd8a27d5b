"""Torch's global hooks of modules and optimizers, and their listeners."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from swapkit._runtime.model import hook_bypass
from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat.internals import (
    ANY_HOOK_CHECK,
    MODULE_CALL,
    MODULE_HOOK_TABLES,
    OPTIMIZER_HOOK_TABLES,
    add_hook,
    forget_removed_hooks,
    has_backward_hook,
    module_hooks,
    optimizer_hooks,
)
from swapkit._runtime.torch_compat.isolation import make_fork_lock, uncompiled, untraced

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

# ---- listeners -----------------------------------------------------------------------------------
#
# The listeners of one set of torch's global hooks, and when torch has the hooks.
#
# Torch calls global hooks on every thread while it iterates over its tables of hooks. Adding or
# removing a hook breaks the iteration of another thread ("OrderedDict mutated during iteration",
# raised in that thread's `optimizer.step()`). So there is one set of hooks. The first listener adds
# the set. Removing the last listener removes the set: a table that holds no other hook is replaced
# by an empty one, which breaks no iteration. If a table holds hooks of others, whose handles refer
# to the table, the set is removed only if every other thread waits and no thread iterates.
# Otherwise the set stays, without effect, until a later removal.
#
# Adding another listener does not touch torch's tables: the listeners are in a tuple that is
# replaced as a whole.

_Listener = TypeVar("_Listener")


class Listeners(Generic[_Listener]):
    """The listeners of one set of torch's hooks. Safe to use from any thread."""

    def __init__(
        self,
        torchs: ModuleType,
        hooks: Mapping[str, Callable[..., Any]],
        register: Callable[[], Iterable[RemovableHandle]],
    ) -> None:
        """Create an empty set.

        An interruption may come at any point. So a hook is looked up in its table, not by a handle,
        and an incomplete set of hooks is removed before a new one is registered.

        Args:
            torchs: torch's module with the tables of hooks.
            hooks: the hook for each table, by the table's name.
            register: registers the hooks with torch, in the order of their tables.
        """
        self.now: tuple[_Listener, ...] = ()
        self.period = 0  # how often torch has got the hooks: what is known from before is stale
        self._torchs = torchs
        self._hooks = hooks
        self._register = register
        self._is_installed = False  # all hooks
        # By table: code that was compiled where torch has the hooks is compiled for their numbers.
        self._numbers: dict[str, int] = {}
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
                self._put_on()
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

    def _put_on(self) -> None:
        """Add our hooks to torch's tables, each time with the same numbers."""
        self.period += 1
        if not self._numbers:
            numbers = [handle.id for handle in self._register()]
            self._numbers = dict(zip(self._hooks, numbers, strict=True))
        else:
            for name, hook in self._hooks.items():
                add_hook(getattr(self._torchs, name), self._numbers[name], hook)

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


# ---- global hooks --------------------------------------------------------------------------------
#
# Torch's global hooks of modules and optimizers, registered once and shared by all of swapkit.
#
# Torch has the hooks while there are listeners. A listener is called on the thread that runs the
# module or the optimizer, with no lock held. At the end of a module call, listeners are called in
# reverse order. A call that began before `remove` may still reach the listener after `remove`:
# listeners must tolerate this.
#
# Torch calls no hook when a forward ends with a `BaseException` that is no `Exception` (Ctrl-C).
# Listeners are notified of this end when the enclosing module call ends or the module is called
# again.


class CallListener(Protocol):
    """Notified of every module call, on the calling thread, with no lock held.

    On a thread that bypasses the hooks (`bypass`), the calls inside the bypassing one are skipped.
    """

    @property
    def may_bypass(self) -> bool:
        """Whether threads may bypass the hooks. On a change, call `hook_bypass.interrupt`."""

    def enter(self, module: torch.nn.Module, /) -> None:
        """Handle the start of a module's forward."""

    def leave(self, module: torch.nn.Module, /) -> None:
        """Handle the end of a forward, also if it raised; `enter` may not have been called before.

        After an interruption the call may come late, with an empty module if the module is freed.
        """


class StepListener(Protocol):
    """Notified of every step of any optimizer, on the stepping thread, with no lock held."""

    def before_step(self, optimizer: torch.optim.Optimizer, /) -> None:
        """Handle the start of a step."""

    def after_step(self, optimizer: torch.optim.Optimizer, /) -> None:
        """Handle the end of a step. Not called if the step raised."""


class ModuleCall:
    """One module call that listeners are notified of; the same object at its start and end."""

    __slots__ = ("find_module", "has_raised")

    def __init__(self, module: torch.nn.Module) -> None:
        self.find_module = weakref.ref(module)
        self.has_raised = False  # set at the end of the call


class _RunningCalls(threading.local):
    """The running module calls that were announced on this thread, innermost last."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.calls: list[ModuleCall] = []  # may have a tail left by an interruption
        self.period = 0
        self.latest: ModuleCall | None = None  # the latest call that listeners were notified of

    def now(self) -> _RunningCalls:
        """Return itself, without calls noted by an earlier set of hooks."""
        if self.period != calls.period:
            self.ids, self.calls, self.period = [], [], calls.period
        return self

    def enter(self, module: torch.nn.Module) -> None:
        """Notify listeners that a call begins."""
        self.latest = call = ModuleCall(module)
        del self.calls[len(self.ids) :]
        self.calls.append(call)
        self.ids.append(id(module))
        for listener in calls.now:
            listener.enter(module)

    def leave_call(self, own: int, *, has_raised: bool) -> None:
        """Notify listeners that the innermost call of the module with id `own` has ended."""
        if own not in self.ids:
            return  # the call began before there were listeners
        while self.ids[-1] != own:
            self.leave(has_raised=True)  # an inner call, interrupted without a hook
        self.leave(has_raised=has_raised)

    def leave(self, *, has_raised: bool) -> None:
        """Notify listeners that the innermost call has ended."""
        hook_bypass.end()
        self.ids.pop()
        self.latest = call = self.calls[len(self.ids)]
        del self.calls[len(self.ids) :]
        call.has_raised = has_raised
        module = call.find_module()
        if module is None:  # freed: pass an empty module
            module = torch.nn.Module()
        for listener in reversed(calls.now):
            listener.leave(module)

    def settle(self, module: torch.nn.Module) -> None:
        """When a noted module is called again, report the calls that ended without a hook."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        on_stack = sum(each is module for each in running_modules(frame)) - 1  # this call
        noted = [index for index, each in enumerate(self.ids) if each == id(module)]
        if on_stack < len(noted):
            while len(self.ids) > noted[max(0, on_stack)]:
                self.leave(has_raised=True)


_running = _RunningCalls()


def running_modules(frame: FrameType | None) -> list[torch.nn.Module]:
    """Return the modules whose calls are on the stack of a frame, innermost first."""
    found = []
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def _has_other_hook() -> bool:
    """Return whether torch has global hooks of modules that are not ours.

    For torch's own check before its warning about compiled modules. A filter of warnings would not
    do: the user's own filters have priority, and any change makes Python repeat warnings.
    """
    return has_backward_hook() or not calls.are_alone()


# ---- hooks called by torch ----------------------------------------------------------------------


# Modules inside a larger compiled part have no calls: the compiler traces these two hooks, which
# then do nothing. With `Module.compile` it meets a hook alone, and skips the hook and callees.
@untraced
def _enter(module: torch.nn.Module, _inputs: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    running = _running.now()
    if id(module) in running.ids:
        hook_bypass.end()
        running.settle(module)
    elif hook_bypass.is_active():
        return  # torch calls global hooks for a module with own hooks even on a bypassing thread
    running.enter(module)


@untraced
def _leave(module: torch.nn.Module, _inputs: object, _output: object) -> None:
    if torch.compiler.is_compiling():
        return
    # After an exception, torch calls the hooks from the outer function. Other signs mislead:
    # `sys.exc_info` may be an exception that the caller handles, and a forward may return None.
    has_raised = sys._getframe(1).f_code is MODULE_CALL  # noqa: SLF001
    _running.now().leave_call(id(module), has_raised=has_raised)


class AnnouncedCall:
    """Context manager that announces a running module call to listeners added inside the call.

    So a scope that is opened in a module's `forward` gets one call in which its thread can bypass,
    instead of a notification for each inner module.
    """

    __slots__ = ("_module", "_period")

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._period = 0  # the set of hooks at the announcement; 0: not announced here

    @untraced
    def __enter__(self) -> None:
        running = _running.now()
        if id(self._module) not in running.ids and not hook_bypass.is_active():
            self._period = calls.period
            running.enter(self._module)

    @untraced
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._period == _running.period:
            _running.leave_call(id(self._module), has_raised=kind is not None)


def bypass() -> hook_bypass.Bypass | None:
    """Let this thread bypass the hooks until the module call just entered ends, if listeners allow.

    Returns:
        The bypass. None: a listener needs all module calls, or torch cannot skip the hooks.
    """
    # Prepare first: another thread may add a listener meanwhile, which voids the bypass.
    prepared = hook_bypass.prepare(_running.ids[-1])
    if (
        prepared is None
        or not all(listener.may_bypass for listener in calls.now)
        or not calls.prepare_bypass()
    ):
        return None
    hook_bypass.begin(prepared)
    return prepared


def this_call() -> ModuleCall | None:
    """Return the module call whose start or end the listeners on this thread are handling."""
    return _running.latest


def find_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the module call that a listener's `enter` is handling.

    Torch does not pass keyword arguments to global hooks, and a hook on the module would be copied
    and pickled with the module. So the arguments are read from the frame that calls the hooks.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not _enter.__code__:
        frame = frame.f_back
    if frame is None:
        return (), {}
    caller = {} if frame.f_back is None else frame.f_back.f_locals
    return frame.f_locals["_inputs"], caller.get("kwargs", {})


# A step may be compiled; the listeners are not.
@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for listener in steps.now:
        listener.before_step(optimizer)


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for listener in steps.now:
        listener.after_step(optimizer)


# ---- registration -------------------------------------------------------------------------------


def _register_calls() -> tuple[RemovableHandle, ...]:
    setattr(module_hooks, ANY_HOOK_CHECK, _has_other_hook)  # stays: without ours, as torch's
    return (
        module_hooks.register_module_forward_pre_hook(_enter),
        module_hooks.register_module_forward_hook(_leave, always_call=True),
    )


def _register_steps() -> tuple[RemovableHandle, ...]:
    return (
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    )


calls: Listeners[CallListener] = Listeners(
    module_hooks, dict(zip(MODULE_HOOK_TABLES, (_enter, _leave), strict=True)), _register_calls
)
steps: Listeners[StepListener] = Listeners(
    optimizer_hooks,
    dict(zip(OPTIMIZER_HOOK_TABLES, (_before_step, _after_step), strict=True)),
    _register_steps,
)
