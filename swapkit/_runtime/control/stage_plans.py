"""Less memory for the stages of a pipeline that wait for the slowest one.

A session whose recorded step was a pipeline's tells the other stages what its own plan takes. Once
the times of all stages are known, the slowest one decides how long the step is: each other stage
tries the plan with the least memory that takes no longer. Waits for other ranks do not count: they
get shorter where the stage has more to do. All ranks find the same slowest stage from the same
times, whenever they read them, and a stage that says nothing leaves all plans as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.control.stage_exchange import StageTimes, find_pipelines
from swapkit.planning.selection.lean_trials import is_near, used_bytes
from swapkit.reporting.machines import format_seconds
from swapkit.texts import get_logger
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.control.stage_exchange import Pipelines, StageExchange
    from swapkit.ir.plans import Plan
    from swapkit.ir.stages import StagePlace
    from swapkit.planning.selection.asking import MakePlans
    from swapkit.planning.selection.cases import Case
    from swapkit.planning.selection.learner import Learner

_log = get_logger(__name__)


class StagePlans:
    """One session's stage of a pipeline, if it is one. On the thread of its steps."""

    def __init__(self, prepare: Callable[[float], MakePlans] | None) -> None:
        """Join no pipeline yet.

        Args:
            prepare: takes the limit of a step in seconds, and returns a function that makes the
                plan with the least memory within it, on any thread; None: no such plans are made.
        """
        self._prepare = prepare
        self._pipelines: Pipelines | None = None
        self._exchange: StageExchange | None = None
        self._own: tuple[Plan, StageTimes, float] | None = None  # and the waits of its step
        self._slowest: StageTimes | None = None
        self._followed: Plan | None = None  # with less memory

    def end_step(self, learner: Learner) -> None:
        """Hear the other stages, and have the learner try a plan with less memory.

        Raises:
            Exception: an error of planning.
        """
        case = learner.case
        if case is None or case.trace is None or case.trace.place is None:
            return
        exchange = self._join(case.trace.place)
        if exchange is None:
            return
        found = exchange.end_step(self._find_times(case) if learner.has_one_kind else None)
        if found and self._own is not None:
            slowest = min(found, key=lambda rank: (-found[rank].work_seconds, found[rank].stages))
            self._slowest = found[slowest]
            waits = self._own[2]
            is_own = slowest == exchange.rank
            most_seconds = 0.0 if is_own else self._slowest.work_seconds + waits
            self._lean(learner, case, most_seconds)

    def _lean(self, learner: Learner, case: Case, most_seconds: float) -> None:
        """Have the learner try the plan with the least memory within a time; 0: follow its own."""
        if self._prepare is None:
            return
        learner.lean_within(most_seconds, self._prepare)
        followed = None if case.lean.former is None else case.lean.plan
        if followed is not None and followed is not self._followed:
            _log.info("%s", self.describe(case))
        self._followed = followed

    def leave(self) -> None:
        """Withdraw from the pipeline, without waiting. Any thread."""
        pipelines, exchange = self._pipelines, self._exchange
        if pipelines is not None and exchange is not None:
            pipelines.leave(exchange)

    def describe(self, case: Case | None) -> str:
        """Return a sentence about the pipeline's step and this stage's plan; empty: not known."""
        exchange, slowest = self._exchange, self._slowest
        if exchange is None or slowest is None or case is None:
            return ""
        place, lean = exchange.place, case.lean
        is_own = slowest.stages == place.stages
        whose = "this one" if is_own else _name_stages(slowest.stages)
        text = (
            f"{_name_stages(place.stages)} of {place.count}: the pipeline's step takes "
            f"{format_seconds(slowest.step_seconds)} ({whose})"
        )
        if lean.plan is None or lean.former is None or case.chosen is not lean.plan:
            return text
        return (
            f"{text}; this stage's plan takes {format_bytes(used_bytes(lean.plan))} instead of "
            f"{format_bytes(used_bytes(lean.former))} for it"
        )

    def _join(self, place: StagePlace) -> StageExchange | None:
        """Return the session's part in a pipeline; None: there are no other ranks in it."""
        pipelines = find_pipelines() if len(place.ranks) > 1 else None
        known = self._exchange
        if known is not None and pipelines is self._pipelines and known.place == place:
            return known
        self.leave()  # a former process group's, or another pipeline's
        self._pipelines, self._slowest = pipelines, None
        self._exchange = None if pipelines is None else pipelines.join(place)
        return self._exchange

    def _find_times(self, case: Case) -> StageTimes | None:
        """Return the times of the case's own plan; None: it has none."""
        plan, trace = case.own, case.trace
        if plan is None or plan.prediction is None or case.changes:
            return None
        if any(each.plan is plan and not each.is_known for each in case.trials):
            return None  # its only step so far may have waited for the planning of other ranks
        assert trace is not None
        assert trace.place is not None
        predicted = plan.prediction.step_seconds
        step_seconds = predicted * case.pace
        known = self._own
        if known is None or known[0] is not plan:
            waits = trace.wait_seconds
        elif is_near(step_seconds, known[1].step_seconds):
            return known[1]  # others need not hear of each step
        else:
            waits = known[2]
        times = StageTimes(
            stages=trace.place.stages,
            work_seconds=max(0.0, predicted - waits),
            step_seconds=step_seconds,
        )
        self._own = plan, times, waits
        return times


def _name_stages(stages: tuple[int, ...]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
