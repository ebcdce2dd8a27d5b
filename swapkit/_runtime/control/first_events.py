"""Where a step begins if the session's model is not called as a whole.

Pipeline schedules call stages of a model; other programs call its parts, or functions. Their steps
begin with the first call of a module of the model, in forward (without a model: of any module), or
with the first tensor that autograd saves, whichever comes first. So what the previous step leaves
behind until then (gradients, the last batch, results) is not part of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.shim.types import Packer


class FirstEvent:
    """Waits for the first event of a step. Holds no lock.

    `wait`, `end` and `is_call` run on the thread of the steps. `saved` runs on any thread that
    saves a tensor in the session; only the thread of the steps begins one.
    """

    def __init__(
        self,
        packer: Packer,
        find_model: Callable[[], torch.nn.Module | None],
        is_here: Callable[[], bool],
    ) -> None:
        """Wait for nothing yet.

        Args:
            packer: the session's; its observer is free while a step is waited for.
            find_model: returns the session's model; None: it has none.
            is_here: returns whether the current thread runs the session's steps.
        """
        self._packer = packer
        self._find_model = find_model
        self._has_model = find_model() is not None
        self._is_here = is_here
        self._begin: Callable[[], object] | None = None  # None: no step is waited for
        self._parts: frozenset[int] | None = None  # the modules of the model; None: not looked up

    def wait(self, begin: Callable[[], object]) -> None:
        """Wait for a step. `begin` is called where a tensor is saved before a module is called."""
        self._begin, self._parts = begin, None
        self._packer.observer = self

    def end(self) -> None:
        """Stop waiting."""
        self._begin = self._parts = None
        if self._packer.observer is self:
            self._packer.observer = None

    def is_call(self, module: torch.nn.Module) -> bool:
        """Return whether the call of a module, which begins now, is the event waited for."""
        if self._begin is None or not torch.is_grad_enabled() or graph_task() != NO_TASK:
            return False
        return not self._has_model or self._is_part(module)

    def _is_part(self, module: torch.nn.Module) -> bool:
        if self._parts is None:  # once per step: modules may be replaced between steps
            model = self._find_model()
            self._parts = frozenset(() if model is None else map(id, model.modules()))
        # A compiled form has the module itself as its only child.
        return id(module) in self._parts or id(getattr(module, "_orig_mod", None)) in self._parts

    # ---- an observer of the packer ---------------------------------------------------------------

    @untraced
    def saved(self, tensor: torch.Tensor, packed: object) -> None:
        """Begin the step, unless the tensor is saved in backward or on another thread."""
        begin = self._begin  # read once: another thread may end the session
        if begin is None or graph_task() != NO_TASK or not self._is_here():
            return
        begin()
        observer = self._packer.observer
        if observer is not None and observer is not self:
            observer.saved(tensor, packed)

    def used(self, packed: object, tensor: torch.Tensor) -> None:
        """Do nothing: a backward of the previous step's graph may still run."""
