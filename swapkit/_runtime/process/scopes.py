"""Scopes: parts of a program whose saved tensors are treated as the user chose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from swapkit._runtime.model.tracker import Need
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.hooks import Hooks, Pair
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.internals import hooks_disabled_message, top_hooks
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit.errors import InvalidArgument, SessionError
from swapkit.ir.plans import Action, Tier

# ---- scopes --------------------------------------------------------------------------------------
#
# Scopes: parts of a program whose saved tensors are treated as the user chose.
#
# A scope is opened on the thread that runs the program. It uses the swapper of the session that is
# active there, or the device's default swapper outside of any session.


class OpenScope:
    """One entry of a scope by one thread. Any thread may end it."""

    def __init__(self, scope: Scope) -> None:
        """Prepare it for this thread."""
        runtime = get_runtime()
        self.scope = scope
        self.hooks = Hooks(runtime.current_swapper(), scope.placement)
        self._is_alone = not runtime.active  # no session, whose reports name modules
        self._stack = thread_state.scopes
        self._tracker = runtime.tracker

    def __enter__(self) -> None:
        try:
            self._tracker.start(self, Need.LABELS if self._is_alone else Need.MODULES)
            self.hooks.enter()
            self._stack.append(self)
            self.scope.entries.append(self)
        except BaseException:
            self.leave()
            raise

    @property
    def is_here(self) -> bool:
        """Whether this thread has opened it."""
        return self._stack is thread_state.scopes

    def __exit__(self, *_: object) -> None:
        """End the scope. Hooks that another thread cannot pop from torch's stack are inert."""
        self.leave()
        if all(each.hooks.placement.action is not Action.SWAP for each in self._stack[:]):
            self.hooks.swapper.end_scope()

    def leave(self) -> None:
        """Undo `__enter__`, even if it was interrupted half-way."""
        try:
            self._leave()
        except BaseException:  # an interruption: neither the placement nor its hooks may stay
            self._leave()
            raise

    def _leave(self) -> None:
        for opened in (self._stack, self.scope.entries):
            if self in opened:
                opened.remove(self)
        try:
            self.hooks.leave()
        finally:
            self._tracker.stop(self)


class Scope:
    """A placement as a reusable, reentrant context manager. Any thread may enter and end it."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.entries: list[OpenScope] = []  # of all threads

    def __reduce__(self) -> tuple[type[Scope], tuple[Placement]]:
        """Copy and pickle as a scope that is not open."""
        return Scope, (self.placement,)

    @untraced
    def __enter__(self) -> None:
        entered = self._prepare()
        try:
            entered.__enter__()
        except BaseException:  # an interruption after the scope was entered
            entered.leave()
            raise

    def _prepare(self) -> OpenScope:
        placement = self.placement
        to_disk = placement.action is Action.SWAP and placement.tier is Tier.DISK
        if to_disk and not get_runtime().current_swapper().scheduler.has_disk:
            raise InvalidArgument(
                'to="disk" needs a disk: train inside swapkit.budget(..., disk="/path")'
            )
        return OpenScope(self)

    @contextlib.contextmanager
    @untraced
    def opened(self) -> Iterator[None]:
        """Open the scope, and close it even if an interruption hits the exit.

        With plain `with scope:`, a signal handler that raises at the start of `__exit__` would
        leave the scope open.
        """
        entered = self._prepare()
        try:
            entered.__enter__()
            yield
        finally:
            try:
                entered.__exit__()
            except BaseException:
                entered.leave()
                raise

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A copy: other threads may end scopes. A generator that holds one may be closed on another
        # thread than the one that entered it.
        entries = sorted(self.entries, key=lambda each: each.is_here)
        if not entries:
            raise SessionError("a scope must begin before it ends: it is not open on any thread")
        entries[-1].__exit__()


@untraced
def innermost_placement() -> Placement | None:
    """Return the placement of this thread's innermost open scope, if any."""
    scopes: list[OpenScope] = thread_state.scopes[-1:]  # one read: other threads may end the scope
    return scopes[0].hooks.placement if scopes else None


@untraced
def default_placement(swapper: Swapper) -> Placement:
    """Return the placement of tensors saved now that are not swapped; a budget may move them."""
    scope = innermost_placement()
    if swapper not in get_runtime().active or (scope and scope.action is Action.KEEP):
        return Placement(Action.KEEP)
    return Placement(Action.AUTO, min_bytes=swapper.evictor.min_bytes)


# ---- selected tensors ----------------------------------------------------------------------------
#
# A scope for some of the tensors saved in it: those that a function of the user selects.


@contextlib.contextmanager
def opened_for(placement: Placement, selects: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Open a scope for the saved tensors that `selects` returns True for.

    The hooks around the scope get all others, as if there were no scope. Where hooks are disabled,
    nothing is selected.

    Args:
        placement: for the selected tensors.
        selects: called by the thread that saves a tensor, with no lock held.
    """
    with contextlib.ExitStack() as stack:
        around = _top()
        if around is None:  # the default scope only detects in-place changes, as torch would
            swapper = get_runtime().current_swapper()
            stack.enter_context(Scope(default_placement(swapper)).opened())
            around = _top()
        stack.enter_context(Scope(placement).opened())
        inside = _top()
        if around is not None and inside is not None and hooks_disabled_message() is None:
            stack.enter_context(_selecting(around, inside, selects))
        yield


def _top() -> Pair | None:
    return top_hooks(True)  # noqa: FBT003


def _selecting(
    around: Pair, inside: Pair, selects: Callable[[torch.Tensor], bool]
) -> contextlib.AbstractContextManager[Any]:
    """Return a context with hooks that call one pair or the other."""

    @untraced
    def pack(tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        pack_with, unpack_with = inside if selects(tensor) else around
        return unpack_with, pack_with(tensor)

    @untraced
    def unpack(packed: tuple[Callable[[Any], torch.Tensor], Any]) -> torch.Tensor:
        unpack_with, content = packed
        return unpack_with(content)

    context: contextlib.AbstractContextManager[Any]
    context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    return context
