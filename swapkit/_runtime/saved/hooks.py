"""Pairs of saved-tensor hooks: how they compose with others, and on which threads they are."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.tracker import find_called, find_weakly
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.types import Packer, Placement, RegionHooks
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat.dispatch_modes import drop_left
from swapkit._runtime.torch_compat.internals import (
    AROUND_MODULE_CALL,
    DISABLE_CALL,
    ENABLE_CALL,
    ENGINE_CALL,
    NO_TASK,
    autograd,
    graph_task,
    hooks_disabled_message,
    pop_hooks,
    push_hooks,
    top_hooks,
)
from swapkit._runtime.torch_compat.isolation import (
    hidden,
    make_fork_lock,
    untraced,
    untraced_itself,
)

# ---- hooks ---------------------------------------------------------------------------------------
#
# Pairs of saved-tensor hooks, and how they compose with hooks of other code.
#
# Autograd calls only the innermost pair of hooks on a thread. Our pairs are made to compose:
#
# - *A foreign pair outside of ours* (`save_on_cpu`, a compressor, a checkpointed region around the
#   scope) is called first, as if ours did not exist. If its pack returns a tensor, we may move that
#   tensor; other results are kept unchanged. Its unpack gets the same object back. So a
#   checkpointed region is still recomputed.
# - *A foreign pair inside ours* replaces ours for the tensors saved there, as in plain torch.
# - *Ours inside ours*: the inner placement holds.
# - *A region of ours* (`recompute/captured.py`) is called before our pairs inside it.
# - *A backward pass*: torch copies the pairs on the stack at each node, which costs a quarter of
#   the node's own work. Ours leave the stack for the pass if the previous step followed its plan to
#   the end and nothing was saved in backward under this plan. Tensors saved before are still
#   unpacked. A tensor that is saved in such a pass stays on the device until a rescue finds it
#   (`existing_graphs.py`). After a step with a rescue, our pairs stay on the stack for the next
#   step.
# - *Function transforms* (`torch.func`) and other code that disables hooks: torch refuses to
#   disable hooks while a pair is on the stack. So ours leave the stack, and tensors saved meanwhile
#   stay on the device.

Pair: TypeAlias = "tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]"


def _top() -> Pair | None:
    return top_hooks(True)  # noqa: FBT003


class Hooks:
    """One pair of hooks with a placement. Entered and left once.

    The swapper keeps the saved tensors, also after the pair has left.
    """

    def __init__(
        self,
        swapper: Swapper,
        placement: Placement,
        packer: Packer | None = None,
        region: RegionHooks | None = None,
    ) -> None:
        """Prepare a pair; torch calls it after `enter`.

        Args:
            swapper: carries the placement out.
            placement: how saved tensors are treated.
            packer: the packer of another pair with this placement, which this pair shares.
            region: the hooks of a region, which replace the packer.
        """
        self.region = region
        self.swapper = swapper
        self.placement = placement
        self.packer = region or packer or swapper.mover.packer(placement)
        self._is_stand_in = packer is not None
        self._has_entered = self._has_left = False
        self._is_popped = False  # taken off torch's stack, or about to be
        self._task = graph_task()
        self._stack = thread_state.hooks
        self._foreign: Pair | None = None
        self.pair: Pair | None = None

    def enter(self) -> None:
        """Push the pair onto this thread's stack; without effect where hooks are disabled."""
        if hooks_disabled_message() is not None:
            return
        pop_left()
        self._task = graph_task()
        self._stack = thread_state.hooks
        self._foreign = None if self.region is not None else _foreign_pair()
        ours: Pair = (self.packer.pack, self.packer.unpack)
        self.pair = ours if self._foreign is None else _compose(self._foreign, ours)
        # Before the push: without the detour, other code could not disable hooks.
        _detour_for(self)
        self._has_entered = True
        self._push()

    def leave(self) -> None:
        """Undo `enter`.

        Torch can only pop the top of the calling thread's stack. If another pair is above, or on
        another thread, this pair goes inert and leaves the stack together with our next pair that
        does. The same holds in the middle of a backward pass: at its end, the engine restores the
        stack from its beginning.
        """
        if self._has_entered and not self._has_left:
            self._has_left = True
            if self.region is None and self.packer.awaited:  # else only backward would come to it
                self.swapper.pack_awaited(self.packer)
            if not self._is_stand_in and self.region is None:  # else the packer is in use elsewhere
                self.packer.is_inert = True
            with suppress(ValueError):
                thread_state.hooks_aside.remove(self)
            if self not in self._stack:  # else where it is popped
                _end_detour_for(self)
        if self._is_loose:  # also if a signal handler raised before `thread_state.hooks` had it
            self._pop()
        pop_left()

    @property
    def _is_over(self) -> bool:
        """Whether it has left, or its region has ended (an interruption may skip `leave`)."""
        return self._has_left or (self.region is not None and not self.region.is_open)

    @property
    def _is_on_top(self) -> bool:
        top = _top()
        return top is not None and self.pair is not None and top[0] is self.pair[0]

    @property
    def _is_loose(self) -> bool:
        """Whether it can be popped now, and the engine will not restore it."""
        return self._is_on_top and self._task == graph_task()

    def _push(self) -> None:
        assert self.pair is not None
        push_hooks(*self.pair)
        thread_state.hooks.append(self)

    def _push_again(self) -> None:
        """Undo `_pop`, even if it was interrupted half-way."""
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
        if self in self._stack:
            self._stack.remove(self)
        if self._has_left:
            _end_detour_for(self)


def pop_left() -> None:
    """Pop the pairs and modes of this thread that have left but could not be popped then."""
    drop_left()
    stack = thread_state.hooks
    while stack and stack[-1]._is_over:  # noqa: SLF001 - same module
        ours = stack[-1]
        if ours._is_loose:  # noqa: SLF001
            ours._pop()  # noqa: SLF001
        elif ours._is_popped:  # noqa: SLF001 - `_pop` was interrupted
            ours._forget()  # noqa: SLF001
        else:
            return


@untraced
def innermost() -> Hooks | None:
    """Return our pair that autograd calls first on this thread.

    None: there is none, or another pair is called before it, as in a recomputed region.
    """
    if not thread_state.hooks:
        return None
    ours = thread_state.hooks[-1]
    is_asked = ours._is_on_top and ours._foreign is None  # noqa: SLF001 - same module
    return ours if is_asked and ours.region is None and not ours.packer.is_inert else None


@untraced
def is_foreign() -> bool:
    """Return whether foreign hooks see this thread's saved tensors, or hooks are disabled."""
    return hooks_disabled_message() is not None or _foreign_pair() is not None


def _foreign_pair() -> Pair | None:
    """Return the pair that autograd would call on this thread without our pairs."""
    top = _top()
    if top is None or not thread_state.hooks:
        return top
    ours: Hooks = thread_state.hooks[-1]
    if not ours._is_on_top:  # noqa: SLF001 - same module
        return top
    return ours._foreign if ours.region is None else ours.pair  # noqa: SLF001


class Around(NamedTuple):
    """The pack hooks around a region, for the tensors that the region does not keep itself."""

    pack: Callable[[torch.Tensor], Any] | None  # None: there are no hooks
    # Of the hooks through which a session or a recorder sees the step's events; None: no hooks.
    events: Callable[[torch.Tensor], Any] | None


@untraced
def around_region() -> Around | None:
    """Return the hooks around a region that begins here; None: it may not have its own hooks.

    It may not under foreign hooks, which see all tensors saved here, or where hooks are disabled.
    An enclosing region of ours does not count as foreign.
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
    """The result of our pack for a tensor that a foreign pack returned."""

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


# ---- code that disables hooks, and backward passes ----------------------------------------------


@contextlib.contextmanager
@untraced
def suspended() -> Iterator[None]:
    """Take our pairs off the top of this thread's stack inside the context."""
    aside: list[Hooks] = []
    try:
        _set_aside(aside)
        yield
    finally:
        _put_back(aside)


def _set_aside(aside: list[Hooks]) -> None:
    """Take our pairs off the top of this thread's stack, and add them to a list."""
    while thread_state.hooks:
        ours = thread_state.hooks[-1]
        if not ours._is_on_top:  # noqa: SLF001 - same module
            break  # a foreign pair is inside ours
        aside.append(ours)  # before the pop: a signal handler may raise anywhere
        ours._pop()  # noqa: SLF001


def _put_back(aside: list[Hooks]) -> None:
    """Undo `_set_aside`, but for pairs that have left."""
    while aside:
        ours = aside[-1]
        if not ours._has_left:  # noqa: SLF001 - same module
            ours._push_again()  # noqa: SLF001
        aside.pop()


_skips_backward = attrgetter("packer.skips_backward")
_CREATE_GRAPH = 2  # its index in `args`, after the outputs
_torchs_backward = getattr(torch.autograd, ENGINE_CALL)


@untraced_itself
def _run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Run torch's function of this name; our pairs leave the stack if all skip backward."""
    stack = thread_state.hooks
    may_skip = len(args) > _CREATE_GRAPH and not args[_CREATE_GRAPH] and graph_task() == NO_TASK
    skips = stack and may_skip and all(map(_skips_backward, stack))
    try:
        with suspended() if skips else contextlib.nullcontext():
            return _torchs_backward(outputs, *args, **kwargs)
    except torch.OutOfMemoryError:
        _forget_failed_pass()
        raise


@untraced
def _forget_failed_pass() -> None:
    """Have the engine drop the nodes and gradients of a pass that failed on this thread.

    They wait in its queue until the next pass begins, so a program that skips the batch would run
    its next forward beside them. A pass over a leaf on `meta` takes no memory.
    """
    if graph_task() == NO_TASK:
        with suspended(), hidden():
            leaf = torch.empty((), device="meta", requires_grad=True)
            torch.autograd.grad(leaf, leaf, torch.empty((), device="meta"))


# The pairs that need the detours. After an interruption, a pair that has left may remain here until
# it is freed; this only costs time.
_detoured: weakref.WeakSet[Hooks] = weakref.WeakSet()
# Reentrant: a finalizer may end a scope while the lock is held.
_detour_lock = make_fork_lock()
_torchs_disable, _torchs_enable = (getattr(autograd, name) for name in (DISABLE_CALL, ENABLE_CALL))


@untraced
@functools.wraps(_torchs_disable)
def _disable(error_message: str, fail_if_non_empty: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
    """Disable hooks on this thread as torch's function does; our pairs leave the stack before."""
    if fail_if_non_empty:  # torch disables them even where it fails since others are on the stack
        _set_aside(thread_state.hooks_aside)
    _torchs_disable(error_message, fail_if_non_empty)


@untraced
@functools.wraps(_torchs_enable)
def _enable() -> None:
    """Undo `_disable`."""
    _torchs_enable()
    _put_back(thread_state.hooks_aside)


_DETOURS = (
    (autograd, DISABLE_CALL, _torchs_disable, _disable),
    (autograd, ENABLE_CALL, _torchs_enable, _enable),
    (torch.autograd, ENGINE_CALL, _torchs_backward, _run_backward),
)


def _detour_for(hooks: Hooks) -> None:
    """Replace torch's functions that disable hooks (for `torch.func`) or run a backward pass.

    The replacements take our pairs off the stack. They stay until the last pair is popped. Those of
    the first kind are what `disable_saved_tensors_hooks` calls, and the code that the compiler puts
    in its place: that function itself has to stay, since the compiler knows it by its identity.
    """
    with _detour_lock:
        _detoured.add(hooks)
        for module, name, torchs, ours in _DETOURS:
            if getattr(module, name) is torchs:
                setattr(module, name, ours)


def _end_detour_for(hooks: Hooks) -> None:
    with _detour_lock:
        _detoured.discard(hooks)
        for module, name, torchs, ours in _DETOURS if not _detoured else ():
            if getattr(module, name) is ours:
                setattr(module, name, torchs)


# ---- lent hooks ----------------------------------------------------------------------------------
#
# A session's hooks on other threads, while these threads run the session's model.
#
# Autograd's hooks are per thread. If a step runs on another thread than the one that entered the
# session (an executor, a worker of a trainer), the session would not see its saved tensors. So a
# thread that runs the session's model gets the session's hooks for the duration of the forward.
# Tensors saved outside of the forward, such as by the loss, are adopted when memory is short
# (`existing_graphs.py`).
#
# If a forward is interrupted, its end is noticed only when the thread next calls the model
# (`model/global_hooks.py`). If the thread never does, the end of the session takes back as much as
# it can from another thread. The hooks are inert then, and are removed when the thread next enters
# or leaves a session.


class _Loan(NamedTuple):
    """The hooks that were lent to one call of the model."""

    hooks: Hooks
    entered: list[Swapper]  # the sessions of the call's thread
    thread: int

    def end(self) -> None:
        """Take the hooks back as far as this thread can. Safe to call twice."""
        with suppress(ValueError):
            self.entered.remove(self.hooks.swapper)
        self.hooks.leave()


class _Lent(threading.local):
    """The loans of the calls of the model on this thread, innermost last; None: no loan."""

    def __init__(self) -> None:
        self.calls: list[_Loan | None] = []


class Lending:
    """Lends the hooks of one session. `enter` and `leave` run on any thread, with no lock held."""

    may_bypass = True  # needs no events from inside the model's calls

    def __init__(self, hooks: Hooks, model: torch.nn.Module) -> None:
        """Prepare; nothing is lent before `start`."""
        self._hooks = hooks
        self._find_model = find_weakly(model)
        self._lent = _Lent()
        self._lock = threading.Lock()  # guards the next two; no other lock is taken inside
        self._loans: list[_Loan] = []
        self._is_on = False

    def start(self) -> None:
        """Start lending. Call it before adding listeners that need the session's hooks."""
        self._is_on = True
        global_hooks.calls.add(self)

    def stop(self) -> None:
        """Stop lending. A forward that still runs returns its hooks when it ends."""
        with self._lock:
            self._is_on = False
            loans = list(self._loans)
        for loan in loans:
            if not self._is_running(loan):
                self._end(loan)
        self._leave_if_done()

    def enter(self, module: torch.nn.Module) -> None:
        """Lend the hooks to a call of the model on a thread without a session."""
        if find_called(module, self._find_model()) is None:
            return
        calls = self._lent.calls
        calls.append(None)
        if not self._is_wanted():
            return
        hooks = Hooks(self._swapper, self._hooks.placement, self._hooks.packer)
        loan = _Loan(hooks, self._entered, threading.get_ident())
        with self._lock:
            if not self._is_on:
                return
            self._loans.append(loan)
        calls[-1] = loan
        self._entered.append(self._swapper)
        hooks.enter()

    def leave(self, module: torch.nn.Module) -> None:
        """Take the call's hooks back."""
        calls = self._lent.calls
        if find_called(module, self._find_model()) is None or not calls:
            return
        loan = calls.pop()
        if loan is not None:
            try:
                self._end(loan)
            finally:
                self._leave_if_done()

    @property
    def _swapper(self) -> Swapper:
        return self._hooks.swapper

    @property
    def _entered(self) -> list[Swapper]:
        return thread_state.sessions

    def _is_wanted(self) -> bool:
        """Return whether the call saves tensors in forward, on a thread without a session."""
        return not self._entered and torch.is_grad_enabled() and graph_task() == NO_TASK

    def _is_running(self, loan: _Loan) -> bool:
        """Return whether the call still runs, perhaps on another thread."""
        running = threads.receivers(loan.thread, AROUND_MODULE_CALL)
        return any(find_called(each, self._find_model()) is not None for each in running)

    def _end(self, loan: _Loan) -> None:
        try:
            loan.end()
        finally:
            with self._lock, suppress(ValueError):
                self._loans.remove(loan)

    def _leave_if_done(self) -> None:
        with self._lock:
            is_done = not self._is_on and not self._loans
        if is_done:
            global_hooks.calls.remove(self)
