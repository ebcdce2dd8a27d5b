"""Scopes: parts of a program whose saved tensors are treated as the user chose.

A scope is opened where the program runs, on its thread, with the swapper of the session that is
active there, or with the process's own outside any session.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from swapkit._native.sched import Tier
from swapkit._runtime.choice import Action, Choice
from swapkit._runtime.guards import untraced
from swapkit._runtime.hooks import Hooks
from swapkit._runtime.runtime import get_runtime
from swapkit.errors import InvalidArgument, SessionError

if TYPE_CHECKING:
    from types import TracebackType

    from swapkit._runtime.swapper import Swapper


class _Entered(NamedTuple):
    """A scope that a thread has open."""

    scope: Scope
    hooks: Hooks
    is_alone: bool  # it began outside of any session, whose figures name modules


class _Open(threading.local):
    """The scopes that this thread has open, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Entered] = []


_open = _Open()


class Scope:
    """A choice, as a context manager that any thread may enter, again and again, also in itself."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    @untraced
    def __enter__(self) -> None:
        runtime = get_runtime()
        swapper = runtime.current_swapper()
        choice = self.choice
        to_disk = choice.action is Action.SWAP and choice.tier is Tier.DISK
        if to_disk and not swapper.scheduler.has_disk:
            raise InvalidArgument(
                'to="disk" needs a disk: train inside swapkit.budget(..., disk="/path")'
            )
        hooks = Hooks(swapper, choice)
        entered = _Entered(self, hooks, is_alone=not runtime.active)
        runtime.tracker.start(is_scope=entered.is_alone)
        try:
            hooks.enter()
            _open.stack.append(entered)
        except BaseException:
            if entered in _open.stack:
                _open.stack.remove(entered)
            hooks.leave()
            runtime.tracker.stop(is_scope=entered.is_alone)
            raise

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stack = _open.stack
        entered = next((each for each in reversed(stack) if each.scope is self), None)
        if entered is None:
            raise SessionError("a scope must end on the thread that it began on")
        stack.remove(entered)
        hooks = entered.hooks
        try:
            hooks.leave()
        finally:
            get_runtime().tracker.stop(is_scope=entered.is_alone)
        if all(each.hooks.choice.action is not Action.SWAP for each in stack):
            hooks.swapper.end_scope()


@untraced
def innermost_choice() -> Choice | None:
    """Return the choice of the scope that this thread has opened last, if one is open."""
    return _open.stack[-1].hooks.choice if _open.stack else None


@untraced
def resting_choice(swapper: Swapper) -> Choice:
    """Return what becomes of what is saved now and not swapped: a budget may still move it."""
    scope = innermost_choice()
    if swapper not in swapper.runtime.active or (scope and scope.action is Action.KEEP):
        return Choice(Action.KEEP)
    return Choice(Action.AUTO, min_bytes=swapper.rescue.min_bytes)
