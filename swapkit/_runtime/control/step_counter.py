"""Where the steps of a session end: after the steps of its optimizers.

Torch tells of every optimizer's step in the process. A session's are those that it was given, or,
while none of these steps, those that hold parameters of its model (libraries make their optimizers
later, or other ones); with neither model nor optimizer, those that step on its thread.

With several optimizers a step ends when each has stepped at least once since the last end: so a
critic may step five times for each step of a generator. One that is overtaken by `MOST_AHEAD` steps
of another is not waited for until it steps again. An optimizer that shows up right after an end may
be the last of the step that has ended, which nobody could know, or the first of the next: the
latter if nothing is run forward before another one steps.

A step of an optimizer that runs another's (a wrapper), or a closure, is one. Optimizers that step
in the middle of a backward pass (from hooks of parameters) count as one that steps when the
outermost pass has ended.

An update that is left out, as by a gradient scaler that has seen an overflow, ends nothing: its
forward and backward belong to the step that ends with the next update.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.tracker import NO_MODULE
from swapkit._runtime.torch_compat.internals import (
    NO_TASK,
    current_node,
    engine,
    graph_task,
    nodes_made,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

MOST_AHEAD = 16
# Steps that nobody counted before the user is told.
STEPS_UNTIL_WARNING = 3
# Steps of an optimizer that was not given, before it counts since none of those given has stepped.
# Once one of these has, it takes `MOST_AHEAD` without any of theirs: another phase of the training.
STEPS_UNTIL_INSTEAD = 2

# How many nodes of graphs were made on this thread: a forward makes some, an optimizer none.


class _Member:
    """One optimizer of the session's, or all that step in backward."""

    __slots__ = ("is_given", "is_waited_for", "joined_at", "steps")

    def __init__(self, *, is_given: bool = False) -> None:
        self.is_given = is_given
        self.steps = 0  # since the last end
        self.is_waited_for = True
        self.joined_at: int | None = None  # nodes then, until it is known to which step it belongs

    def settle(self) -> None:
        """Leave the first step to the session's step before, if a forward came after it."""
        if self.joined_at is not None and self.joined_at != nodes_made():
            self.steps, self.joined_at = 0, None


class StepCounter:
    """Calls `end_step` where a step of a session ends. A listener of `global_hooks.steps`.

    Torch calls it on whichever thread an optimizer steps, with no lock held; `end_step` is called
    there, likewise. Its own lock guards what it has counted, and is held for no call outside.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizers: Iterable[torch.optim.Optimizer],
        end_step: Callable[[], None],
        *,
        is_here: Callable[[], bool],
        rebase: Callable[[int], None],
        tag: int,
    ) -> None:
        """Count nothing before `start`.

        Args:
            model: whose parameters tell optimizers that were not given.
            optimizers: that were given.
            end_step: called at the end of each step.
            is_here: whether the session was entered on the running thread.
            rebase: sets the label of what this thread allocates outside of modules.
            tag: the label of what an optimizer's step allocates.
        """
        self._model = model
        self._end_step = end_step
        self._is_here = is_here
        self._rebase = rebase
        self._tag = tag
        self._members: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Member]
        self._members = weakref.WeakKeyDictionary(
            {each: _Member(is_given=True) for each in optimizers}
        )
        self._has_given = bool(self._members)
        # Those of the model that step while no given one does, and how often.
        self._instead: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._instead = weakref.WeakKeyDictionary()
        self._in_backward: _Member | None = None
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]]
        self._held = weakref.WeakKeyDictionary()
        self._tasks: set[int] = set()  # the backward passes whose ends are waited for
        self._lock = threading.RLock()
        self._have_given_stepped = False
        self._ended = 0
        self._uncounted = 0
        self._is_by_hand = False

    def start(self) -> None:
        """Begin to see steps."""
        global_hooks.steps.add(self)

    def stop(self) -> None:
        """Count no more. A step that is under way on another thread may still call in."""
        global_hooks.steps.remove(self)
        with self._lock:
            self._has_given, self._model = False, None
            self._end_step, self._is_here = _do_nothing, bool
            self._members.clear()

    def mark(self) -> bool:
        """Note that the user ends a step; return whether it has not ended yet.

        Who marks steps marks all of them: optimizers that were not given end none from now on. The
        first mark may come right after a step that one of these has ended: that is the same step.
        """
        with self._lock:
            if self._has_given:
                return True
            is_same = not self._is_by_hand and self._ended > 0
            self._is_by_hand = True
            return not is_same

    # ---- for the hooks ---------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Name what the step allocates."""
        if self._is_ours(optimizer):
            self._rebase(self._tag)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the session's step, if this was the last of its optimizers."""
        # Steps inside of steps are one: a wrapper's, or the same optimizer's where a class calls
        # `super().step()`. Torch calls the hooks of each.
        if any(outer is optimizer or self._is_ours(outer) for outer in _outer_steps(optimizer)):
            return
        if not self._is_ours(optimizer):
            self._note_other(optimizer)
            return
        self._rebase(NO_MODULE)
        if graph_task() != NO_TASK:
            self._wait_for_backward(optimizer)
        else:
            self._note(optimizer)

    # ---- which optimizers ------------------------------------------------------------------------

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        with self._lock:
            if self._is_by_hand:
                return False
            if optimizer in self._members or self._has_given:
                return optimizer in self._members
        return self._holds(optimizer) if self._model is not None else self._is_here()

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds a parameter of the model."""
        if self._model is None:
            return False
        known, holds = self._held.get(optimizer, (0, False))
        if holds:
            return True
        own = [id(each) for group in optimizer.param_groups for each in group["params"]]
        state = hash(tuple(own))
        if known == state:
            return False
        parameters = {id(each) for each in self._model.parameters()}
        holds = not parameters.isdisjoint(own)
        self._held[optimizer] = state, holds
        return holds

    def _note_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that is none of the session's, as far as is known; warn of it once."""
        with self._lock:
            if self._is_by_hand:
                return
            if self._has_given and self._holds(optimizer):
                self._note_instead(optimizer)
                return
            if self._ended > 0:
                return
            self._uncounted += self._is_here()
            is_due = self._uncounted == STEPS_UNTIL_WARNING
        if is_due:
            self._uncounted += 1
            warnings.warn(_describe_uncounted(optimizer, self._model), stacklevel=2)

    def _note_instead(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer count if it steps while none that was given does. The lock is held."""
        seen = self._instead[optimizer] = self._instead.get(optimizer, 0) + 1
        if seen < (MOST_AHEAD if self._have_given_stepped else STEPS_UNTIL_INSTEAD):
            return
        for member in self._members.values():
            member.is_waited_for &= not member.is_given
        self._members[optimizer] = _Member()

    # ---- counting --------------------------------------------------------------------------------

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        with self._lock:
            member = self._members.get(optimizer)
            if member is None:
                member = self._join(optimizer)
            is_end = self._count(member)
        if is_end:
            self._end_step()

    def _settle(self, member: _Member) -> None:
        """Decide to which step those belong that came late, as a member steps. The lock is held."""
        members = self._list_members()
        if member.joined_at is None or member.steps > 0:
            for each in members:
                each.settle()
        if member.joined_at is None:
            for each in members:
                each.joined_at = None  # they belong to the same step

    def _join(self, optimizer: torch.optim.Optimizer) -> _Member:
        """Return what stands for an optimizer that steps for the first time. The lock is held."""
        others = self._list_members()
        for each in others:
            each.settle()
        member = self._members[optimizer] = _Member()
        if others and all(each.steps == 0 or each.joined_at is not None for each in others):
            member.joined_at = nodes_made()
        return member

    def _list_members(self) -> list[_Member]:
        members = list(self._members.values())
        return members if self._in_backward is None else [*members, self._in_backward]

    def _count(self, member: _Member) -> bool:
        """Count a step; return whether the session's step ends. The lock is held."""
        if member.is_given:
            self._have_given_stepped = True
            self._instead.clear()
        members = self._list_members()
        self._settle(member)
        member.steps += 1
        member.is_waited_for = True
        missing = [each for each in members if each.is_waited_for and each.steps == 0]
        if missing and member.steps < MOST_AHEAD:
            return False
        for each in missing:
            each.is_waited_for = False
        for each in members:
            each.steps, each.joined_at = 0, None
        self._ended += 1
        return True

    def _wait_for_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step when the backward passes that run on this thread have ended."""
        with self._lock:
            member = self._members.get(optimizer)
            if member is not None:
                member.is_waited_for = False  # it is counted with the others of the pass
        self.wait_for_pass()

    # ---- for `_PassEnd` --------------------------------------------------------------------------

    def wait_for_pass(self) -> None:
        """Wait for the end of the innermost backward pass that runs on this thread."""
        task = graph_task()
        with self._lock:
            if task in self._tasks:
                return
            self._tasks.add(task)
        engine.queue_callback(_PassEnd(self, task))

    def forget_pass(self, task: int) -> None:
        """Note that the engine has done with a pass, in which something may have been raised."""
        with self._lock:
            self._tasks.discard(task)

    def note_backward(self) -> None:
        """Note that the outermost pass has ended."""
        with self._lock:
            if self._in_backward is None:
                self._in_backward = _Member(is_given=self._has_given)
            is_end = self._count(self._in_backward)
        if is_end:
            self._end_step()


class _PassEnd:
    """What the engine calls at the end of a backward pass in which optimizers step.

    A pass may run inside of another one's node, as for each region of torch's reentrant checkpoint.
    Its end is none of a step: that of the outer pass may be. The engine takes callbacks for the
    innermost pass only, and this one is that until it has let go of all its callbacks: so the
    outer one's end is waited for from where this object goes.
    """

    def __init__(self, counter: StepCounter, task: int) -> None:
        self._counter = counter
        self._task = task
        self._is_inner = False

    def __call__(self) -> None:
        self._is_inner = current_node() is not None
        if not self._is_inner:
            self._counter.note_backward()

    def __del__(self) -> None:
        self._counter.forget_pass(self._task)
        if not self._is_inner:
            return
        if graph_task() == NO_TASK:  # somebody kept this object: it is too late for a callback
            self._counter.note_backward()
        else:
            self._counter.wait_for_pass()


def _do_nothing() -> None:
    """End no step: the session has ended."""


def _outer_steps(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers around whose steps one runs on this thread, innermost first.

    The stack tells it. What hooks remember of steps would be wrong after one that raised, for which
    torch calls no hook.
    """
    found = global_hooks.running_steps(sys._getframe(1))  # noqa: SLF001
    return found[1:] if found and found[0] is optimizer else found


def _describe_uncounted(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> str:
    name = type(optimizer).__name__
    holds = "was not given to it"
    if model is not None:
        holds = f"holds no parameter of its model, a {type(model).__name__}"
    return (
        f"{STEPS_UNTIL_WARNING} steps of an optimizer ended no step of the swapkit session around: "
        f"{name} {holds}. Until steps are counted no plan is made: give what steps as optimizer=, "
        "or call session.mark_step()"
    )
