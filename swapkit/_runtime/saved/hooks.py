"""Pairs of saved-tensor hooks, and how they live with those of others.

Autograd calls only the innermost pair of hooks on a thread. Ours is made to compose:

- *A foreign pair outside of ours* (`save_on_cpu`, a compressor, a checkpointed region around the
  scope) is asked first, as if ours were not there. What it returns is moved if it is a tensor, and
  kept as it is otherwise; its unpack gets it back. So a recomputed region stays recomputed.
- *A foreign pair inside of ours* replaces it for what is saved there, as in plain torch.
- *Ours in ours*: the inner choice holds.
- *A region of ours* (`recompute/captured.py`) is asked before pairs of ours inside of it.
- *A backward pass*: torch copies the pairs on the stack at each of its nodes, which costs a quarter
  of the node's own work. Ours leave the stack meanwhile if nothing was saved in backward while a
  plan was followed to a step's end; what was saved before is unpacked all the same. What is saved
  there after all stays on the device until a rescue finds it (`existing_graphs.py`); after a step
  with a rescue they see the next one.
- *Function transforms* (`torch.func`) and whoever else disables the hooks: torch refuses to do so
  while there are any, so ours step aside meanwhile, and what is saved there stays on the device.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.dispatch_modes import drop_left
from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.torch_compat.internals import (
    ENGINE_CALL,
    NO_TASK,
    graph_task,
    hooks_disabled_message,
    pop_hooks,
    push_hooks,
    top_hooks,
)
from swapkit._runtime.torch_compat.isolation import untraced, untraced_itself

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.placement import Placement
    from swapkit._runtime.shim.types import Packer, RegionHooks

Pair: TypeAlias = "tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]"


def _top() -> Pair | None:
    return top_hooks(True)  # noqa: FBT003


class Hooks:
    """One pair of hooks: a choice, carried out by a swapper. Entered and left once, on one thread.

    What was saved stays with the swapper, whatever becomes of the pair.
    """

    def __init__(
        self,
        swapper: Swapper,
        choice: Placement,
        packer: Packer | None = None,
        region: RegionHooks | None = None,
    ) -> None:
        """Prepare.

        Args:
            swapper: who carries the choice out.
            choice: what becomes of what is saved.
            packer: of another pair with this choice, for which this one stands in.
            region: the hooks of a region, which are asked instead.
        """
        self.region = region
        self.swapper = swapper
        self.choice = choice
        self.packer = region or packer or swapper.mover.packer(choice)
        self._is_stand_in = packer is not None
        self._has_entered = self._has_left = False
        self._is_popped = False  # taken off torch's stack, or about to be
        self._task = graph_task()
        self._foreign: Pair | None = None
        self.pair: Pair | None = None

    def enter(self) -> None:
        """Begin to see what this thread saves; without effect where hooks are disabled."""
        if hooks_disabled_message() is not None:
            return
        pop_left()
        self._task = graph_task()
        self._foreign = None if self.region is not None else _foreign_pair()
        ours: Pair = (self.packer.pack, self.packer.unpack)
        self.pair = ours if self._foreign is None else _compose(self._foreign, ours)
        # Before it is there: without a detour others could not disable hooks.
        _detour_for(self)
        self._has_entered = True
        self._push()

    def leave(self) -> None:
        """Undo `enter`, on the same thread.

        Torch's stack of pairs only gives up its top. Where another pair is on it this one goes
        inert, and leaves the stack with the next one of ours that does. So it does in the middle of
        a backward pass: at its end the engine puts the stack back as it was at its beginning.
        """
        if self._has_entered and not self._has_left:
            self._has_left = True
            if not self._is_stand_in and self.region is None:  # the packer goes on elsewhere
                self.packer.is_inert = True
            _end_detour_for(self)
        if self._is_loose:  # even where a signal handler raised before the stack below knew it
            self._pop()
        pop_left()

    @property
    def _is_over(self) -> bool:
        """Whether it has left, or its region has ended: an interruption may be why it has not."""
        return self._has_left or (self.region is not None and not self.region.is_open)

    @property
    def _is_on_top(self) -> bool:
        top = _top()
        return top is not None and self.pair is not None and top[0] is self.pair[0]

    @property
    def _is_loose(self) -> bool:
        """Whether it can be taken off the stack now, and stays off."""
        return self._is_on_top and self._task == graph_task()

    def _push(self) -> None:
        assert self.pair is not None
        push_hooks(*self.pair)
        thread_state.hooks.append(self)

    def _push_again(self) -> None:
        """Undo `_pop`, as far as that came."""
        assert self.pair is not None
        self._is_popped = False
        if not self._is_on_top:
            push_hooks(*self.pair)
        if self not in thread_state.hooks:
            thread_state.hooks.append(self)

    def _pop(self) -> None:
        self._is_popped = True
        pop_hooks()
        self._forget()

    def _forget(self) -> None:
        if self in thread_state.hooks:
            thread_state.hooks.remove(self)


def pop_left() -> None:
    """Take off this thread's stacks what was left when it could not be taken off: pairs, modes."""
    drop_left()
    stack = thread_state.hooks
    while stack and stack[-1]._is_over:  # noqa: SLF001 - its own kind
        ours = stack[-1]
        if ours._is_loose:  # noqa: SLF001
            ours._pop()  # noqa: SLF001
        elif ours._is_popped:  # noqa: SLF001 - an interruption is why it is known yet
            ours._forget()  # noqa: SLF001
        else:
            return


@untraced
def innermost() -> Hooks | None:
    """Return the pair of ours that this thread's saved tensors meet first.

    None: there is none, or another pair is asked before, as in a recomputed region.
    """
    if not thread_state.hooks:
        return None
    ours = thread_state.hooks[-1]
    is_asked = ours._is_on_top and ours._foreign is None  # noqa: SLF001 - its own kind
    return ours if is_asked and ours.region is None and not ours.packer.is_inert else None


@untraced
def is_foreign() -> bool:
    """Return whether hooks of others see what this thread saves, or nobody may."""
    return hooks_disabled_message() is not None or _foreign_pair() is not None


def _foreign_pair() -> Pair | None:
    """Return the pair that would be asked on this thread if none of ours were there."""
    top = _top()
    if top is None or not thread_state.hooks:
        return top
    ours: Hooks = thread_state.hooks[-1]
    if not ours._is_on_top:  # noqa: SLF001 - its own kind
        return top
    return ours._foreign if ours.region is None else ours.pair  # noqa: SLF001


class Around(NamedTuple):
    """The hooks around a region that begins: what it does not keep itself goes to these."""

    pack: Callable[[torch.Tensor], Any] | None  # None: there are none
    # Of the hooks by which a session, or a recorder, sees the events of a step; likewise.
    events: Callable[[torch.Tensor], Any] | None


@untraced
def around_region() -> Around | None:
    """Return the hooks around a region that begins here; None: it may not have hooks of its own.

    Those of others see all that is saved here. A region around is not one of those.
    """
    if hooks_disabled_message() is not None:
        return None
    pop_left()
    foreign = _foreign_pair()
    if foreign is not None:
        outer = next(
            (each for each in reversed(thread_state.hooks) if each.region is not None), None
        )
        is_ours = outer is not None and outer.pair is foreign
        return Around(outer.packer.pack, _events()) if outer is not None and is_ours else None
    return Around(thread_state.hooks[-1].packer.pack if thread_state.hooks else None, _events())


def _events() -> Callable[[torch.Tensor], Any] | None:
    for each in reversed(thread_state.hooks):
        if each.swapper.events is each.packer:
            return None if each.packer.is_inert else each.packer.pack
    return None


def is_in_region() -> bool:
    """Return whether this thread's operators run in a region that is captured."""
    return any(each.region is not None and each.region.is_open for each in thread_state.hooks)


class _Wrapped:
    """What a foreign pack made of a tensor, and we of that."""

    __slots__ = ("packed",)

    def __init__(self, packed: object) -> None:
        self.packed = packed


def _compose(foreign: Pair, ours: Pair) -> Pair:
    foreign_pack, foreign_unpack = foreign
    our_pack, our_unpack = ours

    @untraced
    def pack(tensor: torch.Tensor) -> object:
        packed = foreign_pack(tensor)
        return _Wrapped(our_pack(packed)) if isinstance(packed, torch.Tensor) else packed

    @untraced
    def unpack(packed: object) -> torch.Tensor:
        inner = our_unpack(packed.packed) if isinstance(packed, _Wrapped) else packed
        return foreign_unpack(inner)

    return pack, unpack


# ---- those who disable hooks --------------------------------------------------------------------


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Take our pairs off the top of this thread's stack for a while."""
    aside: list[Hooks] = []
    try:
        while thread_state.hooks:
            ours = thread_state.hooks[-1]
            if not ours._is_on_top:  # noqa: SLF001 - its own kind
                break  # a foreign pair is inside of ours
            aside.append(ours)  # first: a signal handler may raise anywhere
            ours._pop()  # noqa: SLF001
        yield
    finally:
        for ours in reversed(aside):
            if not ours._has_left:  # noqa: SLF001
                ours._push_again()  # noqa: SLF001


_CREATE_GRAPH = 2  # its place behind the outputs
_torchs_backward = getattr(torch.autograd, ENGINE_CALL)


@untraced_itself
def _run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """As torch's function of this kind; pairs of ours that rest leave the stack meanwhile."""
    stack = thread_state.hooks
    may_rest = len(args) > _CREATE_GRAPH and not args[_CREATE_GRAPH] and graph_task() == NO_TASK
    if not stack or not may_rest or not all(each.packer.rests for each in stack):
        return _torchs_backward(outputs, *args, **kwargs)
    with suspended():
        return _torchs_backward(outputs, *args, **kwargs)


# The pairs for which there is a detour. An interruption may leave one here that has left: until it
# is gone, that costs time only.
_detoured: weakref.WeakSet[Hooks] = weakref.WeakSet()
# Reentrant: a finalizer may end a scope in between.
_detour_lock = make_fork_lock()
_disable = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disable_without_ours(error_message: str) -> Iterator[None]:
    """`torch.autograd.graph.disable_saved_tensors_hooks` while pairs of ours are installed."""
    with suspended(), _disable(error_message):
        yield


def _detour_for(hooks: Hooks) -> None:
    """Let those come past ours who disable hooks, `torch.func` above all; calls nest.

    And backward passes.
    """
    with _detour_lock:
        _detoured.add(hooks)
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_without_ours
        if getattr(torch.autograd, ENGINE_CALL) is _torchs_backward:
            setattr(torch.autograd, ENGINE_CALL, _run_backward)


def _end_detour_for(hooks: Hooks) -> None:
    with _detour_lock:
        _detoured.discard(hooks)
        if not _detoured:
            torch.autograd.graph.disable_saved_tensors_hooks = _disable
            if getattr(torch.autograd, ENGINE_CALL) is _run_backward:
                setattr(torch.autograd, ENGINE_CALL, _torchs_backward)
