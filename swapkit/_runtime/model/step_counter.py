"""Decides where a session's steps end: after the steps of its optimizers.

Torch's global hooks report every optimizer step in the process. A session's optimizers are the ones
given to it. While none of these steps, optimizers that hold parameters of its model count instead
(libraries create optimizers later, or replace them). Without model and optimizers, all optimizers
that step on the session's thread count.

With several optimizers, a step ends when each has stepped at least once since the last end. So a
critic may step five times per generator step. An optimizer that is overtaken by `MOST_AHEAD` steps
of another is not waited for until it steps again. A new optimizer that steps right after an end may
be the last of the ended step or the first of the next one. It is the first of the next step if no
forward runs before another optimizer steps.

Nested steps count as one: an optimizer that wraps another, or a closure. Optimizers that step in
the middle of a backward pass (from parameter hooks) count as one optimizer that steps when the
outermost pass ends.

A skipped update, such as by a gradient scaler after an overflow, ends no step: its forward and
backward belong to the step that ends with the next update.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.global_hooks import running_steps
from swapkit._runtime.model.tracker import NO_MODULE, find_weakly
from swapkit._runtime.torch_compat.internals import (
    NO_TASK,
    current_node,
    engine,
    graph_task,
    nodes_made,
)
from swapkit.errors import warn

if TYPE_CHECKING:
    import torch

OPTIMIZER_STEP = "an optimizer's step"  # the label of its allocations
MOST_AHEAD = 16
# Uncounted optimizer steps before the user is warned.
STEPS_UNTIL_WARNING = 3
# An optimizer that was not given counts from this many steps on, if no given one has ever stepped.
# If one has, it takes `MOST_AHEAD` steps without a given one: another phase of the training.
STEPS_UNTIL_INSTEAD = 2


class _Member:
    """One optimizer of the session, or all optimizers that step in backward."""

    __slots__ = ("is_given", "is_waited_for", "joined_at", "steps")

    def __init__(self, *, is_given: bool = False) -> None:
        self.is_given = is_given
        self.steps = 0  # since the last end
        self.is_waited_for = True
        # `nodes_made()` at its first step, until it is known which session step that belongs to: a
        # forward makes graph nodes on this thread, an optimizer makes none.
        self.joined_at: int | None = None

    def settle(self) -> None:
        """Assign its first step to the previous session step, if a forward has run since."""
        if self.joined_at is not None and self.joined_at != nodes_made():
            self.steps, self.joined_at = 0, None


class StepCounter:
    """Calls `end_step` where a session's step ends. A listener of `global_hooks.steps`.

    Torch calls the listener on the thread where an optimizer steps, with no lock held; `end_step`
    is called in the same way. The counter's own lock guards its counts, and is not held while
    `end_step` runs.
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
            model: its parameters identify optimizers that were not given.
            optimizers: the given optimizers.
            end_step: called at the end of each step.
            is_here: returns whether the session was entered on the running thread.
            rebase: sets the label of this thread's allocations outside of modules.
            tag: the label of an optimizer step's allocations.
        """
        self._find_model = find_weakly(model)
        self._is_of_model = model is not None
        self._end_step = end_step
        self._is_here = is_here
        self._rebase = rebase
        self._tag = tag
        self._members: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Member]
        self._members = weakref.WeakKeyDictionary(
            {each: _Member(is_given=True) for each in optimizers}
        )
        self._has_given = bool(self._members)
        # The model's optimizers that were not given, with their steps since a given one stepped.
        self._instead: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._instead = weakref.WeakKeyDictionary()
        self._in_backward: _Member | None = None
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]]
        self._held = weakref.WeakKeyDictionary()
        self._tasks: set[int] = set()  # backward passes with a callback at their end
        self._lock = threading.RLock()
        self._have_given_stepped = False
        self._ended = 0
        self._uncounted = 0
        self._is_by_hand = False
        self.warns = True  # if optimizers step, and none of them counts

    def start(self) -> None:
        """Begin to see steps."""
        global_hooks.steps.add(self)

    def stop(self) -> None:
        """Stop counting. A step that still runs on another thread may call the hooks once more."""
        global_hooks.steps.remove(self)
        with self._lock:
            self._has_given, self._is_of_model = False, False
            self._find_model = find_weakly(None)
            self._end_step, self._is_here = _do_nothing, bool
            self._members.clear()

    def mark(self) -> bool:
        """Note that the user ends a step; return whether that step has not ended yet.

        From the first mark on, optimizers that were not given end no steps. If such an optimizer
        has ended a step before, the first mark is for the same step.
        """
        with self._lock:
            if self._has_given:
                return True
            is_same = not self._is_by_hand and self._ended > 0
            self._is_by_hand = True
            return not is_same

    # ---- for the hooks ---------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the allocations of the optimizer's step."""
        if self._is_ours(optimizer):
            self._rebase(self._tag)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the session's step, if this was the last of its optimizers."""
        # Nested steps count as one: in a wrapper, or where a class calls `super().step()`. Torch
        # calls the hooks for each of them.
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

    # ---- which optimizers count ------------------------------------------------------------------

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        with self._lock:
            if self._is_by_hand:
                return False
            if optimizer in self._members or self._has_given:
                return optimizer in self._members
        return self._holds(optimizer) if self._is_of_model else self._is_here()

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds a parameter of the model."""
        model = self._find_model()
        if model is None:
            return False
        known, holds = self._held.get(optimizer, (0, False))
        if holds:
            return True
        own = [id(each) for group in optimizer.param_groups for each in group["params"]]
        state = hash(tuple(own))
        if known == state:
            return False
        parameters = {id(each) for each in model.parameters()}
        holds = not parameters.isdisjoint(own)
        self._held[optimizer] = state, holds
        return holds

    def _note_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the step of an optimizer that does not count so far; warn once if it seems to."""
        with self._lock:
            if self._is_by_hand:
                return
            if self._has_given and self._holds(optimizer):
                self._note_instead(optimizer)
                return
            if self._ended > 0:
                return
            self._uncounted += self._is_here()
            is_due = self.warns and self._uncounted == STEPS_UNTIL_WARNING
        if is_due:
            self._uncounted += 1
            warn(_describe_uncounted(optimizer, self._find_model()), stacklevel=2)

    def _note_instead(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer count if it steps while no given one does. The lock is held."""
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
        """Decide which step the first steps of new members belong to. The lock is held."""
        members = self._list_members()
        if member.joined_at is None or member.steps > 0:
            for each in members:
                each.settle()
        if member.joined_at is None:
            for each in members:
                each.joined_at = None  # their first steps belong to the current session step

    def _join(self, optimizer: torch.optim.Optimizer) -> _Member:
        """Add a member for an optimizer that steps for the first time. The lock is held."""
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
        """Count a member's step; return whether the session's step ends. The lock is held."""
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
        """Count a step once all backward passes that run on this thread have ended."""
        with self._lock:
            member = self._members.get(optimizer)
            if member is not None:
                member.is_waited_for = False  # it counts together with the others of the pass
        self.wait_for_pass()

    # ---- for `_PassEnd` --------------------------------------------------------------------------

    def wait_for_pass(self) -> None:
        """Queue a callback for the end of this thread's innermost backward pass."""
        task = graph_task()
        with self._lock:
            if task in self._tasks:
                return
            self._tasks.add(task)
        engine.queue_callback(_PassEnd(self, task))

    def forget_pass(self, task: int) -> None:
        """Note that the engine has finished a pass, perhaps with an exception."""
        with self._lock:
            self._tasks.discard(task)

    def note_backward(self) -> None:
        """Count the end of the outermost pass as one optimizer step."""
        with self._lock:
            if self._in_backward is None:
                self._in_backward = _Member(is_given=self._has_given)
            is_end = self._count(self._in_backward)
        if is_end:
            self._end_step()


class _PassEnd:
    """The engine's callback at the end of a backward pass in which optimizers step.

    A pass may run inside a node of another pass, as in torch's reentrant checkpoint. The end of an
    inner pass ends no step; the end of the outer pass may. The engine accepts callbacks only for
    the innermost pass, and the inner pass is the innermost until it has freed its callbacks. So the
    callback for the outer pass is queued when this object is destroyed.
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
        if graph_task() == NO_TASK:  # this object outlived the pass: too late for a callback
            self._counter.note_backward()
        else:
            self._counter.wait_for_pass()


def _do_nothing() -> None:
    """Do nothing: the session has ended."""


def _outer_steps(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose steps enclose this one on this thread, innermost first.

    Read from the Python stack: torch calls no hook after a step that raised, so a record kept by
    hooks would be wrong after an exception.
    """
    found = running_steps(sys._getframe(1))  # noqa: SLF001
    return found[1:] if found and found[0] is optimizer else found


def _describe_uncounted(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> str:
    name = type(optimizer).__name__
    holds = "was not passed to the session"
    if model is not None:
        holds = f"holds no parameter of the session's model, a {type(model).__name__}"
    return (
        f"a swapkit session counted no step after {STEPS_UNTIL_WARNING} optimizer steps: "
        f"{name} {holds}. The session makes no plan until it counts steps: pass the optimizer that "
        "steps as optimizer=, or call session.mark_step()"
    )
