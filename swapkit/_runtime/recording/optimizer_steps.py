"""Parameters, gradients, optimizer states and optimizer steps of a recorded step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit.ir.traces import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.recording.notes import Notes


class Optimizers:
    """All optimizers that step on a recorded thread. Methods hold or take the recorder's lock.

    Optimizers of other threads are ignored: those threads replace gradients without a lock.
    """

    def __init__(self, notes: Notes, known: tuple[torch.optim.Optimizer, ...]) -> None:
        """Start with the known optimizers; add others when they step."""
        self._notes: Notes | None = notes
        self._lock = notes.lock
        self._storages = notes.storages
        self._known: list[torch.optim.Optimizer] = list(known)
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._tasks: list[int] = []  # for each step under way, the backward pass it runs in
        self._was_backward = False

    def start(self) -> None:
        """Note the state of the known optimizers, and start to see steps."""
        with self._lock:
            for optimizer in self._known:
                self._meet(optimizer)
        global_hooks.steps.add(self)

    def stop(self) -> None:
        """Look for new state a last time; undo `start`."""
        global_hooks.steps.remove(self)
        with self._lock:
            self.look()
        self._notes = None  # break the cycle

    @unseen
    def add_state(self, tensor: torch.Tensor) -> None:
        """Note a parameter or buffer."""
        known = self._parameters.get(id(tensor))
        if known is not None and known() is tensor:
            return
        self._storages.state(tensor, Kind.STATE)
        if tensor.requires_grad:
            self._parameters[id(tensor)] = weakref.ref(tensor)
            if tensor.grad is not None:
                self._storages.state(tensor.grad, Kind.GRADIENT)

    @property
    def is_stepping(self) -> bool:
        """Whether this thread's operators belong to an optimizer step."""
        # A closure recomputes the loss, with gradients enabled; the step itself runs in no_grad.
        is_inside = bool(self._tasks) and graph_task() == self._tasks[-1]
        return is_inside and not torch.is_grad_enabled()

    def phase(self) -> Phase:
        """Return the phase of the operator that just ran on this thread."""
        if self.is_stepping:
            return Phase.OPTIMIZER
        task = graph_task()
        if task != NO_TASK:
            self._was_backward = True
            return Phase.BACKWARD
        if self._was_backward:  # the first operator after backward
            self._was_backward = False
            self.look()
        return Phase.FORWARD

    @unseen
    def look(self) -> None:
        """Look for new gradients and optimizer states."""
        for reference in self._parameters.values():
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self._storages.state(parameter.grad, Kind.GRADIENT)
        for optimizer in self._known:
            for tensor in _states(optimizer):
                self._storages.state(tensor, Kind.OPTIMIZER_STATE)

    def _is_here(self) -> bool:
        recorder = self._notes  # read once: another thread may call `stop`
        return recorder is not None and recorder.is_here()

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.add_state(parameter)
        for tensor in _states(optimizer):
            self._storages.state(tensor, Kind.OPTIMIZER_STATE)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step begins, if this thread is recorded."""
        if not self._is_here():
            return
        with self._lock:
            if not any(each is optimizer for each in self._known):
                self._known.append(optimizer)
                self._meet(optimizer)
            self.look()
            self._tasks.append(graph_task())

    def after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Note that a step has ended."""
        if not self._is_here():
            return
        with self._lock:
            if self._tasks:
                self._tasks.pop()
            self.look()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (value for value in values if isinstance(value, torch.Tensor))
