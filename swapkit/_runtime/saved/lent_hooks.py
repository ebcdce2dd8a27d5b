"""A session's hooks on other threads, while these threads run the session's model.

Autograd's hooks are per thread. If a step runs on another thread than the one that entered the
session (an executor, a worker of a trainer), the session would not see its saved tensors. So a
thread that runs the session's model gets the session's hooks for the duration of the forward.
Tensors saved outside of the forward, such as by the loss, are adopted when memory is short
(`existing_graphs.py`).

If a forward is interrupted, its end is noticed only when the thread next calls the model
(`model/global_hooks.py`). If the thread never does, the end of the session takes back as much as it
can from another thread. The hooks are inert then, and are removed when the thread next enters or
leaves a session.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.model_parts import find_called
from swapkit._runtime.model.weak_models import find_weakly
from swapkit._runtime.saved.hooks import Hooks
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat.internals import AROUND_MODULE_CALL, NO_TASK, graph_task

if TYPE_CHECKING:
    from swapkit._runtime.saved.swapper import Swapper


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
