"""The plan that a session follows now, and the executors of the latest plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.saved.swapper import Swapper
from swapkit.planning.selection.cases import Instruction
from swapkit.planning.selection.learner import CASES_KEPT

if TYPE_CHECKING:
    import torch


class Following:
    """Follows one plan at a time, on the thread that runs the steps."""

    def __init__(self, swapper: Swapper, find_model: Callable[[], torch.nn.Module | None]) -> None:
        """Follow no plan yet. `find_model`: returns the model whose operators are repeated."""
        self._swapper = swapper
        self._find_model = find_model
        # By `id` of the plan, and whether it is followed at any size.
        self._executors: OrderedDict[tuple[int, bool], PlanExecutor] = OrderedDict()
        self.executor: PlanExecutor | None = None  # of the plan that is followed

    @property
    def is_exact(self) -> bool:
        """Whether a plan is followed that is only for the sizes of its trace."""
        return self.executor is not None and not self.executor.for_any_length

    def follow(self, instruction: Instruction) -> None:
        """Follow the plan of an instruction from the next event on."""
        trace, plan, is_any = instruction.trace, instruction.plan, instruction.for_any_length
        assert plan is not None
        assert trace is not None
        latest = self.executor
        is_latest = latest is not None and latest.plan is plan and latest.for_any_length is is_any
        if latest is not None and is_latest and latest.is_following:
            return
        self.stop()
        executor = self._executors.pop((id(plan), is_any), None)
        if executor is None:
            executor = PlanExecutor(
                self._swapper, self._find_model(), trace, plan, for_any_length=is_any
            )
        self._executors[id(plan), is_any] = executor
        while len(self._executors) > CASES_KEPT:
            self._executors.popitem(last=False)
        self.executor = executor  # first: an interruption may come before `start` returns
        try:
            executor.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Follow no plan. A second call goes on after an interruption."""
        if self.executor is not None:
            try:
                self.executor.stop()
            finally:
                if self.executor.has_ended:  # else the next call goes on
                    self.executor = None
