"""Forwards of a session's model: handling of forwards that raise or that follow the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.execution.plan_executor import PlanExecutor, StepReport
    from swapkit._runtime.model.hook_bypass import Bypass
    from swapkit._runtime.model.tracker import ModuleTracker


class Forwards:
    """The forwards of the current step. Called on the thread that runs the step.

    A step begins again if its first forward raised: no part of the step is done then. If another
    forward raised, the step goes on, but is unlike the steps after it.
    """

    def __init__(self) -> None:
        """Begin before any step."""
        self._first: global_hooks.ModuleCall | None = (
            None  # the call of the model that began the step
        )
        self._is_broken = False  # the first forward raised, and no other has begun since
        self._is_odd = False  # another forward raised
        self._was_odd = False  # a forward raised in the previous step

    def begin(self) -> None:
        """Note that the call being reported to listeners is the first of a step."""
        self._first = global_hooks.this_call()

    def leave(self) -> None:
        """Note that the call of the model being reported to listeners has ended."""
        call = global_hooks.this_call()
        if call is None or not call.has_raised or graph_task() != NO_TASK:
            return  # a forward in backward is part of a recomputation
        if call is self._first:
            self._is_broken = True
        elif torch.is_grad_enabled():  # an evaluation is not part of the step
            self._is_odd = True

    def begins_again(self, has_used: Callable[[], bool]) -> bool:
        """Return whether the step begins again with the forward that begins now.

        Args:
            has_used: returns whether a tensor that the step saved was used. An exception may carry
                results (an early exit) that a backward starts from: then part of the step is done.
        """
        was_broken, self._is_broken = self._is_broken, False
        if was_broken:
            self._is_odd = has_used()
        return was_broken and not self._is_odd

    def end(self) -> bool:
        """Note that the step has ended; return whether it is worth learning from.

        A step in which a forward raised is not, unless one also raised in the previous step: then
        all steps may be like that.
        """
        was_odd, self._was_odd = self._was_odd, self._is_odd or self._is_broken
        self._is_odd = self._is_broken = False
        return was_odd or not self._was_odd


class ForwardBypass:
    """Turns off module events in a forward if the step and the previous one follow the plan."""

    def __init__(self, tracker: ModuleTracker) -> None:
        """Begin before any step."""
        self._tracker = tracker
        self._calm: PlanExecutor | None = None  # the executor that the latest step did not leave
        self._bypass: Bypass | None = None  # of the thread that runs the forward

    def begin(self, executor: PlanExecutor | None) -> None:
        """Handle the begin of a forward of the model, as reported to listeners."""
        if executor is None or executor is not self._calm or executor.needs_modules:
            return
        if torch.is_grad_enabled() and executor.now() is not None:
            self._bypass = self._tracker.bypass(executor)

    def end_step(self, executor: PlanExecutor | None, report: StepReport) -> None:
        """Handle the end of the step."""
        self._calm = executor if report.deviation is None else None
        if self._bypass is not None:
            self._bypass.end()  # the forward may have been interrupted, on any thread
