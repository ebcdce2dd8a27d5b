"""Forwards of a session's model: those that raise, and those that go as planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.execution.plan_executor import PlanExecutor, StepReport
    from swapkit._runtime.model.resting import Rest
    from swapkit._runtime.model.tracker import ModuleTracker


class Forwards:
    """What is known of the forwards of the step that runs. Told on the thread that runs it.

    A step begins again if its first forward raised: nothing of it has been done. After any other
    one it goes on, and is another than those that follow.
    """

    def __init__(self) -> None:
        """Know of no step."""
        self._first: global_hooks.ModuleCall | None = (
            None  # the call of the model that began the step
        )
        self._is_broken = False  # it raised, and no other one has begun since
        self._is_odd = False  # another one raised
        self._was_odd = False  # one raised in the step before

    def begin(self) -> None:
        """Note that the call that listeners are being told of is the first of a step."""
        self._first = global_hooks.this_call()

    def leave(self) -> None:
        """Note that the call of the model has ended that listeners are being told of."""
        call = global_hooks.this_call()
        if call is None or not call.has_raised or graph_task() != NO_TASK:
            return  # in backward it is a part of that which is computed again
        if call is self._first:
            self._is_broken = True
        elif torch.is_grad_enabled():  # an evaluation is no part of the step
            self._is_odd = True

    def begins_again(self, has_used: Callable[[], bool]) -> bool:
        """Return whether the step begins again with the forward that begins.

        Args:
            has_used: whether something that the step saved was used. What a forward raises may
                carry results (an early exit), of which a backward comes: then a part is done.
        """
        was_broken, self._is_broken = self._is_broken, False
        if was_broken:
            self._is_odd = has_used()
        return was_broken and not self._is_odd

    def end(self) -> bool:
        """Note that the step has ended; return whether those that follow may be like it.

        An odd one is none to learn from, unless each is: the step before was, too.
        """
        was_odd, self._was_odd = self._was_odd, self._is_odd or self._is_broken
        self._is_odd = self._is_broken = False
        return was_odd or not self._was_odd


class Rests:
    """Lets nobody hear of the model's modules while a step goes as planned, as the one before."""

    def __init__(self, tracker: ModuleTracker) -> None:
        """Begin with a step that is not known."""
        self._tracker = tracker
        self._calm: PlanExecutor | None = None  # what the latest step has followed to its end
        self._rest: Rest | None = None  # of the thread that runs the forward

    def begin(self, executor: PlanExecutor | None) -> None:
        """A forward of the model begins, of which listeners are being told."""
        if executor is None or executor is not self._calm or executor.needs_modules:
            return
        if torch.is_grad_enabled() and executor.now() is not None:
            self._rest = self._tracker.rest(executor)

    def end_step(self, executor: PlanExecutor | None, report: StepReport | None) -> None:
        """The step has ended, with this report if it had a plan."""
        self._calm = executor if report is not None and report.deviation is None else None
        if self._rest is not None:
            self._rest.end()  # whatever became of the forward, on whichever thread
