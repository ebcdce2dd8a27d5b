"""Torch's process-global hooks of modules and optimizers, set once and shared by all of swapkit.

Torch calls these hooks on every thread, and iterates over their dictionaries meanwhile. Adding or
removing one breaks the iteration of another thread ("OrderedDict mutated during iteration", raised
in that thread's `optimizer.step()`). So there is one set of hooks. It is added with the first
listener. It is removed with the last one only if every other thread waits, and no thread is inside
of an optimizer's step; otherwise it stays without effect until listeners leave again.

Listeners come and go without touching torch's dictionaries: they are in a tuple, which is replaced
as a whole. A listener is called on whichever thread runs the module or the optimizer, with no lock
held; where a module ends, those that were added last are called first. A call that began before
`remove` may still reach a listener afterwards: it must take that.

Torch calls no hook where a forward ends by what is no `Exception` (Ctrl-C). The listeners are told
of such an end when the module around ends, or when the module is called again.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from swapkit._runtime.model import resting
from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.torch_compat.internals import (
    MODULE_CALL,
    MODULE_HOOK_TABLES,
    has_global_hook,
    module_hooks,
    optimizer_post_hooks,
    optimizer_pre_hooks,
)
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.utils.hooks import RemovableHandle


class CallListener(Protocol):
    """Who is told of every call of a module, on the thread that calls it, with no lock held.

    Of those inside of a call on a thread that rests (`rest`) nobody is told.
    """

    @property
    def may_rest(self) -> bool:
        """Whether it can do without. Where that changes it calls `resting.interrupt`."""

    def enter(self, module: torch.nn.Module, /) -> None:
        """A module's forward begins."""

    def leave(self, module: torch.nn.Module, /) -> None:
        """It has ended, or raised. Not only where `enter` was called: listening may begin later.

        After an interruption it may come late, and with another module if that one is gone.
        """


class StepListener(Protocol):
    """Who is told of every step of an optimizer, on the thread that steps, with no lock held."""

    def before_step(self, optimizer: torch.optim.Optimizer, /) -> None:
        """A step begins, whichever optimizer's."""

    def after_step(self, optimizer: torch.optim.Optimizer, /) -> None:
        """It has ended. Not called after a step that raised."""


_Listener = TypeVar("_Listener")


class Listeners(Generic[_Listener]):
    """The listeners of one set of torch's hooks. Any thread."""

    def __init__(
        self,
        install: Callable[[], Iterator[RemovableHandle]],
        uninstall: Callable[[], object] = lambda: None,
    ) -> None:
        """Listen to nothing.

        `install` adds torch's hooks one by one; `uninstall` follows their removal. An interruption
        may come between any two of these: hooks are known until they are gone, and where only some
        are there they are removed before they are installed anew.
        """
        self.now: tuple[_Listener, ...] = ()
        self._install = install
        self._uninstall = uninstall
        self._handles: list[RemovableHandle] = []
        self._is_installed = False  # all of them
        # Reentrant: a finalizer may end a listener in the middle of another change.
        self._lock = make_fork_lock()

    def add(self, listener: _Listener) -> None:
        """Tell a listener from now on, after those that are there."""
        with self._lock:
            if listener not in self.now:  # an interruption may have left it here
                self.now = (*self.now, listener)
            resting.interrupt()
            if not self._is_installed:
                self._take_off()
                self._handles.extend(self._install())
                self._is_installed = True

    def prepare_rest(self) -> bool:
        """Return whether torch's hooks can be passed over where a thread rests."""
        with self._lock:
            return resting.install(tuple(self._handles))

    def remove(self, listener: _Listener) -> None:
        """Tell a listener no more; without effect if it is not there."""
        with self._lock:
            self.now = tuple(other for other in self.now if other is not listener)
            resting.interrupt()
            if not self.now and self._handles and threads.others_wait() and not _are_called():
                self._take_off()

    def _take_off(self) -> None:
        self._is_installed = False
        while self._handles:
            self._handles[-1].remove()
            if len(self._handles) == 1:
                self._uninstall()
            self._handles.pop()


# Torch calls the hooks of an optimizer's step in this function, whatever its class.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def running_steps(frame: FrameType | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose steps run on the stack of a frame, innermost first."""
    found = []
    while frame is not None:
        if frame.f_code is _STEP and "self" in frame.f_locals:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def _are_called() -> bool:
    """Return whether some thread may be in the middle of torch's hooks of a step.

    This one, when a session ends in a hook; or another, which waits in a hook.
    """
    others = any(code is _STEP for stack in threads.stacks() for code, _ in stack)
    return others or bool(running_steps(sys._getframe(1)))  # noqa: SLF001


class ModuleCall:
    """One call of a module that listeners are told of: the same object where it begins and ends."""

    __slots__ = ("find_module", "has_raised")

    def __init__(self, module: torch.nn.Module) -> None:
        self.find_module = weakref.ref(module)
        self.has_raised = False  # known at its end


class _RunningCalls(threading.local):
    """The calls of modules that listeners of this thread were told of, innermost last."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.calls: list[ModuleCall] = []  # and what an interruption has left behind them
        self.period = 0
        self.told: ModuleCall | None = None  # the latest that listeners were told of

    def now(self) -> _RunningCalls:
        """Return itself, without what a thread has noted of hooks that are gone."""
        if self.period != _period:
            self.ids, self.calls, self.period = [], [], _period
        return self

    def enter(self, module: torch.nn.Module) -> None:
        """Tell that a call begins."""
        self.told = call = ModuleCall(module)
        del self.calls[len(self.ids) :]
        self.calls.append(call)
        self.ids.append(id(module))
        for listener in calls.now:
            listener.enter(module)

    def leave_call(self, own: int, *, has_raised: bool) -> None:
        """Tell that the innermost call of a module has ended, if it was told of; by its `id`."""
        if own not in self.ids:
            return  # it began before anybody listened
        while self.ids[-1] != own:
            self.leave(has_raised=True)  # inside of it, and unseen
        self.leave(has_raised=has_raised)

    def leave(self, *, has_raised: bool) -> None:
        """Tell that the innermost call has ended."""
        resting.end()
        self.ids.pop()
        self.told = call = self.calls[len(self.ids)]
        del self.calls[len(self.ids) :]
        call.has_raised = has_raised
        module = call.find_module()
        if module is None:  # gone: another one to who asks
            module = torch.nn.Module()
        for listener in reversed(calls.now):
            listener.leave(module)

    def settle(self, module: torch.nn.Module) -> None:
        """Tell of calls that have ended unseen, where a module that is noted is called again."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        on_stack = sum(each is module for each in running_modules(frame)) - 1  # this call
        noted = [index for index, each in enumerate(self.ids) if each == id(module)]
        if on_stack < len(noted):
            while len(self.ids) > noted[max(0, on_stack)]:
                self.leave(has_raised=True)


_running = _RunningCalls()
_period = 0  # of hooks; what a thread has noted in an earlier one is stale


def running_modules(frame: FrameType | None) -> list[torch.nn.Module]:
    """Return the modules that are called on the stack of a frame, innermost first."""
    found = []
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def _ignore_warning() -> None:
    """Hide a warning that is about our hooks alone: a compiled model is told of once more.

    Any change of the filters makes Python show warnings again that it has shown before.
    """
    text = r"Using `torch\.compile\(module\)` when there are global"
    if not any(each[1] is not None and each[1].pattern == text for each in warnings.filters):
        warnings.filterwarnings("ignore", text)


def _forget(table: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> None:
    """Remove a hook of ours that an interruption has left in a table before it was known here."""
    for number in [number for number, each in table.items() if each is hook]:
        del table[number]


def _install_calls() -> Iterator[RemovableHandle]:
    global _period  # noqa: PLW0603
    _period += 1
    if not has_global_hook():  # type: ignore[no-untyped-call]
        _ignore_warning()
    _forget(getattr(module_hooks, MODULE_HOOK_TABLES[0]), _enter)
    _forget(getattr(module_hooks, MODULE_HOOK_TABLES[1]), _leave)
    yield module_hooks.register_module_forward_pre_hook(_enter)
    yield module_hooks.register_module_forward_hook(_leave, always_call=True)


def _install_steps() -> Iterator[RemovableHandle]:
    _forget(optimizer_pre_hooks, _before_step)
    _forget(optimizer_post_hooks, _after_step)
    yield register_optimizer_step_pre_hook(_before_step)
    yield register_optimizer_step_post_hook(_after_step)


calls: Listeners[CallListener] = Listeners(_install_calls, resting.uninstall)
steps: Listeners[StepListener] = Listeners(_install_steps)


# ---- what torch calls ---------------------------------------------------------------------------


# What is compiled as a part of more has no calls of modules: the compiler takes these two in, and
# they do nothing. Where it meets one by itself (`Module.compile`), it leaves it and its callees.
@untraced
def _enter(module: torch.nn.Module, _inputs: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    running = _running.now()
    if id(module) in running.ids:
        resting.end()
        running.settle(module)
    elif resting.is_resting():
        return  # a module with hooks of its own
    running.enter(module)


@untraced
def _leave(module: torch.nn.Module, _inputs: object, _output: object) -> None:
    if torch.compiler.is_compiling():
        return
    # After an exception torch calls the hooks in the outer function itself. What is handled around
    # (`sys.exc_info`) may be an exception of the caller's, and a forward may return None.
    has_raised = sys._getframe(1).f_code is MODULE_CALL  # noqa: SLF001
    _running.now().leave_call(id(module), has_raised=has_raised)


class Running:
    """Tells listeners that have begun inside of a module's call of that call, as a context manager.

    So a scope that a module's `forward` opens has one call to hear of, in which its thread can
    rest, instead of one for each module that this one calls.
    """

    __slots__ = ("_module", "_period")

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._period = 0  # of hooks in which it was told; 0: somebody had told them

    @untraced
    def __enter__(self) -> None:
        running = _running.now()
        if id(self._module) not in running.ids and not resting.is_resting():
            self._period = _period
            running.enter(self._module)

    @untraced
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._period == _running.period:
            _running.leave_call(id(self._module), has_raised=kind is not None)


def rest() -> resting.Rest | None:
    """Let this thread rest until the call ends that a listener is being told of, if all others may.

    Returns:
        The rest; None: somebody needs to hear of all modules.
    """
    # First: another thread may add a listener meanwhile.
    prepared = resting.prepare(_running.ids[-1])
    if (
        prepared is None
        or not all(listener.may_rest for listener in calls.now)
        or not calls.prepare_rest()
    ):
        return None
    resting.begin(prepared)
    return prepared


def this_call() -> ModuleCall | None:
    """Return the call of whose beginning or end a listener of this thread is being told."""
    return _running.told


def find_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the module is called with that a listener's `enter` is being told of.

    Torch does not give keyword arguments to global hooks, and a hook of the module itself would be
    copied and pickled with it. So they are read where torch calls the hooks.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not _enter.__code__:
        frame = frame.f_back
    if frame is None:
        return (), {}
    caller = {} if frame.f_back is None else frame.f_back.f_locals
    return frame.f_locals["_inputs"], caller.get("kwargs", {})


# A step may be compiled; what listeners do is not.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for listener in steps.now:
        listener.before_step(optimizer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for listener in steps.now:
        listener.after_step(optimizer)
