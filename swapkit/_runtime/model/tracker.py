"""The module that runs on a thread, and the names of modules and of a model's parts."""

from __future__ import annotations

import enum
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from swapkit._native.layout import TAG_BACKWARD, TAG_OPTIMIZER
from swapkit._native.pool import set_tag
from swapkit._runtime.model import global_hooks, hook_bypass
from swapkit._runtime.torch_compat.internals import (
    buffers_of,
    parameters_of,
    storage_address,
    submodules_of,
)
from swapkit._runtime.torch_compat.isolation import make_fork_lock
from swapkit._runtime.torch_compat.wrappers import is_plain, tensors_inside
from swapkit.errors import InvalidArgument
from swapkit.texts import encodable
from swapkit.units import show

# ---- weak models ---------------------------------------------------------------------------------
#
# Weak references to a model that may not have been given.


def find_weakly(model: torch.nn.Module | None) -> Callable[[], torch.nn.Module | None]:
    """Return a function that returns the model, or None once the model is gone."""
    return _find_none if model is None else weakref.ref(model)


def _find_none() -> None:
    """Return None: no model was given."""


# ---- module stack --------------------------------------------------------------------------------
#
# The stack of a thread's running modules, and of kernels that run as if they were modules.
#
# Threads: each uses its own stack; no lock is needed.


class Sites(Protocol):
    """Finds the save sites inside a call that bypasses the hooks (see `hook_bypass.py`)."""

    needs_modules: bool  # set if a user on the thread needs all modules after all

    def find_site(self) -> tuple[int, int] | None:
        """Return the site of the current save; None: unknown."""

    def set_blind(self, *, is_blind: bool) -> None:
        """Set whether `find_site` gives the sites of this thread's saves."""


class _BypassedCall:
    """Replaces the module calls inside a bypassing call, which are not tracked."""

    __slots__ = ("depth", "saves", "sites")

    def __init__(self, depth: int, sites: Sites) -> None:
        self.depth = depth  # of the stack of tracked modules
        self.sites = sites
        self.saves: Counter[int] = Counter()  # so far, by module


class RunningOperator:
    """A kernel among the running modules of its thread. Made by `ModuleTracker.enter_operator`."""

    __slots__ = ("position", "tag")

    def __init__(self, tag: int, position: int) -> None:
        """Create it with its tag and its index in the thread's stack."""
        self.tag = tag
        self.position = position


class ModuleStack:
    """Tags of the modules whose forward is running on a thread, outermost first."""

    __slots__ = ("bypass", "operators", "period", "saves", "step", "tags")

    def __init__(self) -> None:
        """Create an empty stack."""
        self.tags: list[int] = []
        self.operators: list[RunningOperator] = []  # those of `tags` that are no modules
        self.saves: list[int] = [0]  # so far, in each of them; outside modules first
        self.bypass: _BypassedCall | None = None
        self.period = 0
        self.step = 0

    @property
    def is_blind(self) -> bool:
        """Whether the innermost module may be an untracked one."""
        return self.bypass is not None and self.bypass.depth == len(self.tags)

    def begin_bypass(self, sites: Sites) -> None:
        """Stop tracking modules until the innermost one ends."""
        self.bypass = _BypassedCall(len(self.tags), sites)
        sites.set_blind(is_blind=True)

    def end_bypass(self) -> None:
        """Track modules again."""
        if self.bypass is not None:
            self.bypass.sites.set_blind(is_blind=False)
            self.bypass = None

    def enter(self, tag: int) -> None:
        """Push a module that begins."""
        if self.is_blind and self.bypass is not None:
            self.bypass.sites.set_blind(is_blind=False)
        self.tags.append(tag)
        self.saves.append(0)

    def leave(self) -> None:
        """Pop the innermost module, unless tracking began inside it, and operators left inside."""
        depth = len(self.tags) - 1
        while self.operators and self.operators[-1].position == depth:
            self.operators.pop()
            depth -= 1
        depth = max(0, depth)
        del self.tags[depth:], self.saves[depth + 1 :]
        self._note_end()

    def enter_operator(self, tag: int) -> RunningOperator:
        """Push an operator that begins."""
        operator = RunningOperator(tag, len(self.tags))
        self.enter(tag)
        self.operators.append(operator)
        return operator

    def leave_operator(self, operator: RunningOperator) -> bool:
        """Remove an operator if it is there; return whether it was the innermost entry."""
        if operator not in self.operators:
            return False
        at = self.operators.index(operator)
        for inner in self.operators[at + 1 :]:
            inner.position -= 1
        position = operator.position
        del self.operators[at], self.tags[position], self.saves[position + 1]
        if self.bypass is not None and position + 1 == self.bypass.depth:
            self.end_bypass()
        elif self.bypass is not None and position < self.bypass.depth:
            self.bypass.depth -= 1
        self._note_end()
        return position == len(self.tags)

    def _note_end(self) -> None:
        """Adapt the bypass after an entry was removed."""
        if self.bypass is not None and len(self.tags) < self.bypass.depth:
            self.end_bypass()
        elif self.is_blind and self.bypass is not None:
            self.bypass.sites.set_blind(is_blind=True)


# ---- model parts ---------------------------------------------------------------------------------
#
# Models of several parts: each is called by itself, as torchtitan's parts or a stage's chunks.
#
# A list of parts becomes one module that is never called and whose children are the parts. It names
# them by their numbers (`0.layers.1`), and the parts do not refer to it. A `ModuleList` that a user
# passes as the model is the same.


class ModelParts(torch.nn.ModuleList):
    """The parts that a user passed as a list."""


def gather_parts(model: object) -> torch.nn.Module | None:
    """Return the model that a user passed: a module, None, or a list of parts as one module.

    Raises:
        InvalidArgument: it is none of these, or a part is inside another one.
    """
    if model is None or isinstance(model, torch.nn.Module):
        return model
    parts = list(model) if isinstance(model, (list, tuple)) else []
    shown = _show_kinds(parts) if parts else show(model)
    if not parts or not all(isinstance(each, torch.nn.Module) for each in parts):
        raise InvalidArgument(
            f"model={shown}: expected a torch.nn.Module, or a list of a model's parts"
        )
    inside = _find_inside(parts)
    if inside is not None:
        inner, outer = inside
        raise InvalidArgument(
            f"model={shown}: part {inner} is inside part {outer}. Pass each part once"
        )
    return parts[0] if len(parts) == 1 else ModelParts(parts)


def _find_inside(parts: list[torch.nn.Module]) -> tuple[int, int] | None:
    """Return the numbers of a part and of another one that it is inside of; None: there is none."""
    pairs = itertools.permutations(range(len(parts)), 2)
    found = (pair for pair in pairs if _is_inside(parts[pair[0]], parts[pair[1]]))
    return next(found, None)


def _is_inside(inner: torch.nn.Module, outer: torch.nn.Module) -> bool:
    return any(each is inner for each in outer.modules())


def _show_kinds(parts: list[object]) -> str:
    return f"[{', '.join(type(each).__name__ for each in parts)}]"


def runs(module: torch.nn.Module) -> bool:
    """Return whether a module has a forward; lists of modules have none."""
    # The class first, which is fast. Then the instance: a compiled module has its own `forward`.
    absent = torch.nn.Module.forward
    return (
        type(module).forward is not absent or getattr(module.forward, "__func__", 0) is not absent
    )


def find_called(module: torch.nn.Module, model: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return the part of the model that is called if `module` is, also in its compiled form.

    A model that is called itself is its only part. None: `module` is another one, or `model` is
    None, because it is gone.
    """
    if module is model or model is None:
        return model
    if not runs(model):
        for part in submodules_of(model).values():
            called = None if part is None else find_called(module, part)
            if called is not None:
                return called
        return None
    is_compiled = type(module).__name__ == "OptimizedModule"
    return model if is_compiled and getattr(module, "_orig_mod", None) is model else None


def parts_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that are called: the model, or the parts of one that is not."""
    if runs(model):
        yield model
        return
    for part in submodules_of(model).values():
        if part is not None:
            yield from parts_of(part)


# ---- tracker -------------------------------------------------------------------------------------
#
# Tracking of running modules: names for saved tensors and for memory holders.
#
# While a tracker is on, it listens to every module's forward on all threads. It keeps a stack of
# modules per thread and labels the blocks that the thread allocates with the module's tag. A
# module's name is its path in the model it was first seen in; a shared module keeps its first path.

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

    def change(self, user: object, need: Need) -> None:
        """Change the need of a user; do nothing after `stop`, which may run on another thread."""
        with self._lock:
            if user in self._users:
                self.start(user, need)

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
        if isinstance(module, torch.fx.GraphModule):  # a compiled region, of several modules alike
            return self.tag_below(outer, type(module).__name__)
        return self._add(module, f"{self._names[outer]}.{type(module).__name__}")

    def _add(self, module: torch.nn.Module, name: str) -> int:
        with self._lock:
            tag = self._tags[module] = self._tag_for(name)
            self._added += 1
            return tag

    def _tag_for(self, name: str) -> int:
        name = encodable(name)  # documents have it
        with self._lock:
            tag = self._tag_of_name.get(name)
            if tag is None:
                tag = self._tag_of_name[name] = len(self._names)
                self._names.append(name)
            return tag


NAMED_STEPS = 2  # whose inner modules are named although there is room
# Times the bytes in use after these steps, in steps in a row: what is kept beyond that is named
# before memory is short.
GROWTH, GROWN_STEPS = 1.25, 3


class NamesIfShort:
    """A user of the tracker: inner modules are named in the first steps, and once memory is short.

    Their calls are the largest cost of a session without a plan that frees nothing; one with a plan
    bypasses them by itself (`control/steps.py`). Addresses are planned by names, so these change at
    most twice. `end_step` runs on the thread that ends the steps.

    A program that keeps what its steps make is short of memory in the end, and the error is to say
    which module made it: so names are back once clearly more is in use than after the first steps.
    """

    def __init__(self, tracker: ModuleTracker) -> None:
        """Do nothing before the tracker has started for it."""
        self.is_recorded = False  # whether the memory's history is, which names modules
        self._tracker = tracker
        self._left = NAMED_STEPS  # steps until no inner module is named
        self._named_bytes = 0  # in use after them
        self._grown = 0  # steps in a row that ended with clearly more

    def end_step(self, in_use_bytes: int, *, is_short: bool) -> None:
        """Handle the end of a step. `is_short`: it needed rescues, the first one also to begin."""
        has_grown = self._left == 0 and in_use_bytes > GROWTH * self._named_bytes
        self._grown = self._grown + 1 if has_grown else 0
        is_first = self._left == NAMED_STEPS
        if (is_short and not is_first) or self._grown == GROWN_STEPS or self.is_recorded:
            if self._left == 0:
                self._tracker.change(self, Need.NAMES)
            self._left = sys.maxsize
        elif self._left > 0:
            self._left -= 1
            if self._left == 0:
                self._named_bytes = in_use_bytes
                self._tracker.change(self, Need.LABELS)
