"""Tracking of running modules: names for saved tensors and for memory holders.

While a tracker is on, it listens to every module's forward on all threads. It keeps a stack of
modules per thread and labels the blocks that the thread allocates with the module's tag. A module's
name is its path in the model it was first seen in; a shared module keeps its first path.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from swapkit._native.lives import TAG_BACKWARD, TAG_OPTIMIZER
from swapkit._native.pool import set_tag
from swapkit._runtime.model import global_hooks, hook_bypass
from swapkit._runtime.model.module_stack import ModuleStack
from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.torch_compat.internals import buffers_of, parameters_of, storage_address
from swapkit._runtime.torch_compat.plain_tensors import is_plain
from swapkit._runtime.torch_compat.wrappers import tensors_inside

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from swapkit._runtime.model.module_stack import RunningOperator, Sites

NO_MODULE = 0
# Added to a module's tag for allocations in its backward.
BACKWARD = TAG_BACKWARD


class _Coarse:
    """Attributes all saves inside a bypassing call to the called module.

    `set_coarse_site`: the shim's function, which sets this module as the site of later saves.
    """

    needs_modules = False

    def __init__(self, set_coarse_site: Callable[[int], object], tag: int) -> None:
        self._set_coarse_site = set_coarse_site
        self._tag = tag

    def find_site(self) -> tuple[int, int]:
        return self._tag, 0

    def set_blind(self, *, is_blind: bool) -> None:
        self._set_coarse_site(self._tag if is_blind else NO_MODULE)


class _ThreadModules(threading.local):
    """The stack of this thread."""

    def __init__(self) -> None:
        self.stack = ModuleStack()
        self.base = NO_MODULE  # the label outside all modules


class Need(enum.Enum):
    """The information that a user of the tracker needs about running modules."""

    MODULES = "modules"  # all of them
    NAMES = "names"  # all except those in a bypassing call (`ModuleTracker.bypass`)
    # No names. If all users need only labels, threads bypass automatically: saves and allocations
    # get the name of the outermost module.
    LABELS = "labels"


class ModuleTracker:
    """Names of the running modules. A tag is the number of a name; 0: no module."""

    def __init__(self, set_coarse_site: Callable[[int], object] = lambda _tag: None) -> None:
        """Create a tracker without modules. `set_coarse_site`: see `Shim`."""
        self._set_coarse_site = set_coarse_site
        self.note_switch: Callable[[], object] = lambda: None  # called when `is_on` has changed
        self._names: list[str] = [""]
        self._tag_of_name: dict[str, int] = {"": NO_MODULE}
        self._tags: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._thread = _ThreadModules()
        self._period = 0  # of tracking; a thread's stack from an earlier period is stale
        self._step = 0
        # The need of each user. Replaced, never changed: readers do not take the lock.
        self._users: dict[object, Need] = {}
        self.is_on = False  # whether allocations are labelled
        self._state: set[int] = set()  # storage objects
        self._added = 0  # modules so far
        # State of the last refresh: modules added, modules still alive, the step.
        self._known = (0, 0, 0)
        self._lock = make_fork_lock()  # guards everything except the threads' stacks

    @property
    def may_bypass(self) -> bool:
        """Whether no user needs all running modules: see `start`."""
        return Need.MODULES not in self._users.values()

    def _only_labels(self, but: object = None) -> bool:
        """Whether all users, except perhaps `but`, need only labels."""
        users = self._users.items()
        return all(need is Need.LABELS for user, need in users if user != but)

    def start(self, user: object, need: Need = Need.MODULES) -> None:
        """Start labelling for a user, which may be any object, until `stop`.

        An interruption may come between any two lines: `stop` also undoes a partial start.
        """
        with self._lock:
            self._users = {**self._users, user: need}
            if not self.is_on:
                self._period += 1
                global_hooks.calls.add(self)
                self.is_on = True
                self.note_switch()
            elif need is Need.MODULES or (need is Need.NAMES and self._only_labels(but=user)):
                hook_bypass.interrupt()
            bypass = self._running().bypass
            if bypass is not None and need is Need.MODULES:
                bypass.sites.needs_modules = True

    def stop(self, user: object) -> None:
        """Undo `start` for a user, also if `start` was interrupted.

        If it is interrupted itself, the next call goes on: the user is removed last.
        """
        with self._lock:
            if user not in self._users:
                return
            left = {other: need for other, need in self._users.items() if other != user}
            if not left:
                self.is_on = False
                self.note_switch()
                global_hooks.calls.remove(self)
                set_tag(NO_MODULE)
            self._users = left

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of a model by their paths."""
        for path, module in model.named_modules():
            if module not in self._tags:
                self._add(module, path or type(module).__name__)

    def name(self, tag: int) -> str:
        """Return the path of the module with this tag, or an empty string. Ignores its bits."""
        index = tag & ~(TAG_BACKWARD | TAG_OPTIMIZER)
        return self._names[index] if index < len(self._names) else ""

    def name_of(self, module: torch.nn.Module) -> str:
        """Return the name of a module, or an empty string if it has none yet."""
        return self._names[self._tags.get(module, NO_MODULE)]

    def tag_named(self, name: str) -> int:
        """Return the tag of a name, also if no module has the name yet."""
        return self._tag_for(name)

    def modules(self) -> list[torch.nn.Module]:
        """Return every named module that still exists."""
        # One call that runs no Python code: another thread may name a module meanwhile.
        references = self._tags.keyrefs()
        return [module for reference in references if (module := reference()) is not None]

    def current(self) -> int:
        """Return the tag of the module whose forward runs on this thread."""
        stack = self._running()
        if stack.is_blind:
            return self._look_up(stack)
        return stack.tags[-1] if stack.tags else NO_MODULE

    def bypass(self, sites: Sites) -> hook_bypass.Bypass | None:
        """Let this thread bypass the hooks, if allowed, until the module call just entered ends."""
        stack = self._running()
        bypass = global_hooks.bypass() if stack.tags else None
        if bypass is not None:
            stack.begin_bypass(sites)
        return bypass

    def site(self) -> tuple[int, int]:
        """Return the site of the current save: module tag, and number of the save in the call.

        It is the same in each step, and when the module is recomputed.
        """
        stack = self._running()
        if stack.is_blind:
            return self._bypassed_site(stack)
        tag = stack.tags[-1] if stack.tags else NO_MODULE
        if tag == NO_MODULE and stack.step != self._step:
            stack.saves[0], stack.step = 0, self._step
        stack.saves[-1] += 1
        return tag, stack.saves[-1] - 1

    def _bypassed_site(self, stack: ModuleStack) -> tuple[int, int]:
        """Return the site during a bypass, and label later allocations with its module."""
        assert stack.bypass is not None
        site = stack.bypass.sites.find_site()
        if site is None:
            tag = self._look_up(stack)
            site = tag, stack.bypass.saves[tag]
            stack.bypass.saves[tag] += 1
        set_tag(site[0])
        return site

    def _look_up(self, stack: ModuleStack) -> int:
        """Return the tag of the innermost tagged module on this thread's Python stack."""
        modules = global_hooks.running_modules(sys._getframe(1))  # noqa: SLF001
        return next((tag for each in modules if (tag := self._tags.get(each))), stack.tags[-1])

    def rebase(self, tag: int) -> None:
        """Set the label of this thread's allocations outside modules."""
        self._thread.base = tag
        set_tag(tag)

    def enter_operator(self, name: str) -> RunningOperator:
        """Track a kernel on this thread as if it were a module, until `leave_operator`."""
        tag = self.tag_below(self.current(), name)
        return self._running().enter_operator(tag)

    def tag_below(self, outer: int, name: str) -> int:
        """Return the tag of a kernel inside a module or another kernel."""
        path = self.name(outer)
        return self._tag_for(f"{path}.{name}" if path else name)

    def leave_operator(self, operator: RunningOperator) -> int | None:
        """Undo `enter_operator`; nothing happens if a module around the kernel has ended since.

        Returns:
            None if the kernel was innermost: the label before it holds again. Otherwise the label
            of the thread's place, which is another one.
        """
        stack = self._running()
        if stack.leave_operator(operator):
            return None
        return stack.tags[-1] if stack.tags else self._thread.base

    # ---- parameters and buffers ------------------------------------------------------------------

    def is_state(self, storage: int) -> bool:
        """Return whether a storage object holds a parameter or buffer of a known module.

        The answer is as of the first call in the step, or since modules were added or freed.
        """
        modules = len(self._tags.data)  # type: ignore[attr-defined]
        if self._known != (self._added, modules, self._step):
            self.refresh_state()
        return storage in self._state

    def end_step(self) -> None:
        """Restart the count of saves outside modules; `is_state` refreshes at its next call."""
        self._step += 1

    def refresh_state(self) -> None:
        """Find the storages of the known modules' parameters and buffers again."""
        added, step = self._added, self._step
        modules = self.modules()
        self._state = {
            storage_address(inside.untyped_storage())
            for module in modules
            for tensor in (*parameters_of(module).values(), *buffers_of(module).values())
            if tensor is not None
            for inside in tensors_inside(tensor)
            if is_plain(inside)
        }
        self._known = added, len(modules), step  # last: other threads check it first

    # ---- calls of modules -----------------------------------------------------------------------

    def _running(self) -> ModuleStack:
        stack = self._thread.stack
        if stack.period != self._period:
            stack.tags, stack.saves, stack.operators = [], [0], []
            stack.period = self._period
            stack.end_bypass()
        return stack

    def enter(self, module: torch.nn.Module) -> None:
        """Note that a module's forward begins on this thread."""
        tag = self._tags.get(module)
        if tag is None:
            tag = self._name_now(module)
        stack = self._running()
        stack.enter(tag)
        set_tag(tag)
        is_outermost = len(stack.tags) == 1
        if is_outermost and self._only_labels() and global_hooks.calls.now == (self,):
            self.bypass(_Coarse(self._set_coarse_site, tag))

    def leave(self, _module: torch.nn.Module) -> None:
        """Note that the innermost module's forward has ended on this thread."""
        stack = self._running()
        stack.leave()
        set_tag(stack.tags[-1] if stack.tags else self._thread.base)

    def _name_now(self, module: torch.nn.Module) -> int:
        """Name a new module: the root of a model, or one inside a call but in no known model."""
        outer = self.current()
        if outer == NO_MODULE:
            self.add_model(module)
            return self._tags[module]
        return self._add(module, f"{self._names[outer]}.{type(module).__name__}")

    def _add(self, module: torch.nn.Module, name: str) -> int:
        with self._lock:
            tag = self._tags[module] = self._tag_for(name)
            self._added += 1
            return tag

    def _tag_for(self, name: str) -> int:
        with self._lock:
            tag = self._tag_of_name.get(name)
            if tag is None:
                tag = self._tag_of_name[name] = len(self._names)
                self._names.append(name)
            return tag
