"""Which module is running: names for saved tensors and for the holders of memory.

While a tracker is on, it is told of every module's forward on any thread, keeps a stack per thread
and labels the blocks that the thread takes with the module's number. A module's name is its path in
the model it was first seen in; a shared module keeps its first path.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from swapkit._native.pool import set_tag
from swapkit._runtime.model import global_hooks, resting
from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.torch_compat.internals import buffers_of, parameters_of, storage_address
from swapkit._runtime.torch_compat.plain_tensors import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

NO_MODULE = 0
# Added to a module's tag for what its backward takes.
BACKWARD = 1 << 31


class Sites(Protocol):
    """Knows where things are saved inside of a call on a thread that rests (`resting.py`)."""

    needs_modules: bool  # set where somebody on the thread has to know the modules after all

    def find_site(self) -> tuple[int, int] | None:
        """Return where something is saved now, as far as it is known."""

    def set_blind(self, *, is_blind: bool) -> None:
        """Note whether `find_site` is to be asked where this thread saves something."""


class _Coarse:
    """Inside of a call on a thread that rests everything is saved in the module that is called.

    `rest_at`: of the shim, which finds it by itself.
    """

    needs_modules = False

    def __init__(self, rest_at: Callable[[int], object], tag: int) -> None:
        self._rest_at = rest_at
        self._tag = tag

    def find_site(self) -> tuple[int, int]:
        return self._tag, 0

    def set_blind(self, *, is_blind: bool) -> None:
        self._rest_at(self._tag if is_blind else NO_MODULE)


class _Rest:
    """What stands for the calls of modules inside of one on whose thread nobody hears of them."""

    __slots__ = ("depth", "saves", "sites")

    def __init__(self, depth: int, sites: Sites) -> None:
        self.depth = depth  # of the modules that are known to run
        self.sites = sites
        self.saves: Counter[int] = Counter()  # so far, by module


class _ModuleStack:
    """Numbers of the modules whose forward is running on a thread, outermost first."""

    __slots__ = ("period", "rest", "saves", "step", "tags")

    def __init__(self) -> None:
        self.tags: list[int] = []
        self.saves: list[int] = [0]  # so far, of each of them; of no module first
        self.rest: _Rest | None = None
        self.period = 0
        self.step = 0

    @property
    def is_blind(self) -> bool:
        """Whether the innermost module may be one that nobody was told of."""
        return self.rest is not None and self.rest.depth == len(self.tags)

    def begin_rest(self, sites: Sites) -> None:
        """Hear of no module until the innermost one ends."""
        self.rest = _Rest(len(self.tags), sites)
        sites.set_blind(is_blind=True)

    def end_rest(self) -> None:
        """Hear of modules again."""
        if self.rest is not None:
            self.rest.sites.set_blind(is_blind=False)
            self.rest = None

    def enter(self, tag: int) -> None:
        """Note that a module begins."""
        if self.is_blind and self.rest is not None:
            self.rest.sites.set_blind(is_blind=False)
        self.tags.append(tag)
        self.saves.append(0)

    def leave(self) -> None:
        """Note that the innermost module ends, unless tracking began inside of it."""
        if self.tags:
            self.tags.pop()
            self.saves.pop()
        if self.rest is not None and len(self.tags) < self.rest.depth:
            self.end_rest()
        elif self.is_blind and self.rest is not None:
            self.rest.sites.set_blind(is_blind=True)


class _ThreadModules(threading.local):
    """The stack of this thread."""

    def __init__(self) -> None:
        self.stack = _ModuleStack()
        self.base = NO_MODULE  # the label outside of all modules


class Need(enum.Enum):
    """What a user of the tracker needs to know of the modules that run."""

    MODULES = "modules"  # all of them
    NAMES = "names"  # not those that run on a thread that rests (`ModuleTracker.rest`)
    # No names. Where all are such, threads rest by themselves: what is saved, and taken, has the
    # name of the outermost module.
    LABELS = "labels"


class ModuleTracker:
    """Names for the modules that run. A tag stands for a name; 0 means: no module."""

    def __init__(self, rest_at: Callable[[int], object] = lambda _tag: None) -> None:
        """Know of no module. `rest_at`: see `Shim`."""
        self._rest_at = rest_at
        self._names: list[str] = [""]
        self._tag_of_name: dict[str, int] = {"": NO_MODULE}
        self._tags: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._thread = _ThreadModules()
        self._period = 0  # of tracking; what a thread's stack holds from an earlier one is stale
        self._step = 0
        # What each needs; replaced, never changed, for those who read it without the lock.
        self._users: dict[object, Need] = {}
        self.is_on = False  # whether what is taken is being labelled
        self._state: set[int] = set()  # storage objects
        self._added = 0  # modules so far
        # When that was: modules added by then, those still there, the step.
        self._known = (0, 0, 0)
        self._lock = make_fork_lock()  # of everything but the threads' stacks

    @property
    def may_rest(self) -> bool:
        """Whether nobody needs it to know all modules that run: see `start`."""
        return Need.MODULES not in self._users.values()

    def _only_labels(self, but: object = None) -> bool:
        """Whether nobody, `but` perhaps one, needs names."""
        users = self._users.items()
        return all(need is Need.LABELS for user, need in users if user is not but)

    def start(self, user: object, need: Need = Need.MODULES) -> None:
        """Start labelling for a user, any object, until `stop`.

        An interruption may come between any two lines: then `stop` undoes what was done.
        """
        with self._lock:
            self._users = {**self._users, user: need}
            if not self.is_on:
                self._period += 1
                global_hooks.calls.add(self)
                self.is_on = True
            elif need is Need.MODULES or (need is Need.NAMES and self._only_labels(but=user)):
                resting.interrupt()
            rest = self._running().rest
            if rest is not None and need is Need.MODULES:
                rest.sites.needs_modules = True

    def stop(self, user: object) -> None:
        """Undo `start` for a user, as far as that came."""
        with self._lock:
            if user not in self._users:
                return
            self._users = {other: need for other, need in self._users.items() if other is not user}
            if not self._users:
                self.is_on = False
                global_hooks.calls.remove(self)
                set_tag(NO_MODULE)

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of a model by their paths in it."""
        for path, module in model.named_modules():
            if module not in self._tags:
                self._add(module, path or type(module).__name__)

    def name(self, tag: int) -> str:
        """Return the path of the module with this tag, or empty text; `BACKWARD` is ignored."""
        index = tag & ~BACKWARD
        return self._names[index] if index < len(self._names) else ""

    def name_of(self, module: torch.nn.Module) -> str:
        """Return the name of a module, or empty text of one that has none yet."""
        return self._names[self._tags.get(module, NO_MODULE)]

    def tag_named(self, name: str) -> int:
        """Return the tag of a name, whether or not a module has it yet."""
        return self._tag_for(name)

    def modules(self) -> list[torch.nn.Module]:
        """Return every named module that still exists."""
        # One call without Python code in it: another thread may name a module meanwhile.
        references = self._tags.keyrefs()
        return [module for reference in references if (module := reference()) is not None]

    def current(self) -> int:
        """Return the tag of the module whose forward runs on this thread."""
        stack = self._running()
        if stack.is_blind:
            return self._look_up(stack)
        return stack.tags[-1] if stack.tags else NO_MODULE

    def rest(self, sites: Sites) -> resting.Rest | None:
        """Let this thread rest, if it may, until the call ends that a listener is told of now."""
        stack = self._running()
        rest = global_hooks.rest() if stack.tags else None
        if rest is not None:
            stack.begin_rest(sites)
        return rest

    def site(self) -> tuple[int, int]:
        """Return where the thread saves something now: module, and number of the save in its call.

        The same from step to step, and when the module is recomputed.
        """
        stack = self._running()
        if stack.is_blind:
            return self._site_at_rest(stack)
        tag = stack.tags[-1] if stack.tags else NO_MODULE
        if tag == NO_MODULE and stack.step != self._step:
            stack.saves[0], stack.step = 0, self._step
        stack.saves[-1] += 1
        return tag, stack.saves[-1] - 1

    def _site_at_rest(self, stack: _ModuleStack) -> tuple[int, int]:
        """Return what `site` does, and label what follows."""
        assert stack.rest is not None
        site = stack.rest.sites.find_site()
        if site is None:
            tag = self._look_up(stack)
            site = tag, stack.rest.saves[tag]
            stack.rest.saves[tag] += 1
        set_tag(site[0])
        return site

    def _look_up(self, stack: _ModuleStack) -> int:
        """Return the tag of the innermost module that has one; look at the calls of this thread."""
        modules = global_hooks.running_modules(sys._getframe(1))  # noqa: SLF001
        return next((tag for each in modules if (tag := self._tags.get(each))), stack.tags[-1])

    def rebase(self, tag: int) -> None:
        """Let what this thread takes outside of modules have a label, from now on."""
        self._thread.base = tag
        set_tag(tag)

    def enter_operator(self, name: str) -> int:
        """Let a kernel run on this thread as if it were a module; return its tag."""
        outer = self._names[self.current()]
        tag = self._tag_for(f"{outer}.{name}" if outer else name)
        self._running().enter(tag)
        return tag

    def leave_operator(self) -> None:
        """Undo `enter_operator`."""
        self._running().leave()

    # ---- parameters and buffers ------------------------------------------------------------------

    def is_state(self, storage: int) -> bool:
        """Return whether a storage object holds a parameter or buffer of a known module.

        As it was when this was first asked in the step, or since another module is known.
        """
        modules = len(self._tags.data)  # type: ignore[attr-defined]
        if self._known != (self._added, modules, self._step):
            self.refresh_state()
        return storage in self._state

    def end_step(self) -> None:
        """Count what is saved outside of modules anew. Who asks for the state looks again."""
        self._step += 1

    def refresh_state(self) -> None:
        """Look where the known modules' parameters and buffers are: they may have been moved."""
        added, step = self._added, self._step
        modules = self.modules()
        self._state = {
            storage_address(tensor.untyped_storage())
            for module in modules
            for tensor in (*parameters_of(module).values(), *buffers_of(module).values())
            if is_plain(tensor)
        }
        self._known = added, len(modules), step  # last: other threads go by it

    # ---- calls of modules -----------------------------------------------------------------------

    def _running(self) -> _ModuleStack:
        stack = self._thread.stack
        if stack.period != self._period:
            stack.tags, stack.saves, stack.period = [], [0], self._period
            stack.end_rest()
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
            self.rest(_Coarse(self._rest_at, tag))

    def leave(self, _module: torch.nn.Module) -> None:
        """Note that the innermost module's forward has ended on this thread."""
        stack = self._running()
        stack.leave()
        set_tag(stack.tags[-1] if stack.tags else self._thread.base)

    def _name_now(self, module: torch.nn.Module) -> int:
        """Name a module first seen now: the root of a model, or one that is in no model known."""
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
