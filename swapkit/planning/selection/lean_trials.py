"""The part of a learner that tries a plan with less memory, where the step may take longer.

A stage of a pipeline waits for the slowest one. Once that one's time is known, the stage asks for
the plan with the least memory that is not slower. It tries this plan beside its own for a few steps
each. The lean plan wins if it needs no rescue and its measured step is not longer: the prediction
knows nothing of the other stages. If it needs rescues later, the case's own plan is back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from swapkit.ir.plans import Plan
from swapkit.planning.selection.asking import Found, MakePlans
from swapkit.planning.selection.cases import (
    FASTER,
    Asked,
    Case,
    Lean,
    Outcome,
    Request,
    Timing,
    Tried,
)
from swapkit.planning.selection.taking import Taking

# With each of the two plans: the first steps map memory, and other stages may be busy with plans.
# The median of the others counts: a step in which the stage catches up with others is too short.
SETTLING, STEPS = 2, 5
ROUNDS = 2  # until the lean plan counts as slower
GAIN = 0.99  # times the memory of the own plan: less is worth a trial


class LeanTrials(Taking):
    """The base of a learner: everything about plans with less memory for the same time."""

    def lean_within(self, most_seconds: float, prepare: Callable[[float], MakePlans]) -> None:
        """Ask for the plan with the least memory whose predicted step takes no longer than this.

        A call with about the same time as before changes nothing. Another one goes back to the
        case's own plan first. Call between two steps, on their thread.

        Args:
            most_seconds: limit of the step; 0: there is none, so follow the own plan.
            prepare: takes the limit; returns a function that makes that plan on any thread.

        Raises:
            Exception: an error of planning.
        """
        case = self._now
        if case is None or case is self._general or case.chosen is None or case.asked is not None:
            return
        if case.trace is None or is_near(most_seconds, case.lean.most_seconds):
            return
        if case.is_trying_lean:
            case.candidates, case.leader = [], None
        self._end_lean_trials(case)
        case.lean = Lean(most_seconds=most_seconds)
        if most_seconds > 0:
            request = Request(
                trace=case.trace, count=1, shares=(case.share,), make_plans=prepare(most_seconds)
            )
            self._ask(Asked(case, request, is_lean=True))

    def _take_lean(self, case: Case, found: Found) -> None:
        """Try the own plan and the lean one, if that takes less memory."""
        own = case.chosen
        if found.plans and own is not None and used_bytes(found.plans[0]) <= GAIN * used_bytes(own):
            case.lean.plan = found.plans[0]
            case.lean.seconds = {False: [], True: []}
            case.candidates = _list_steps(own, found.plans[0])

    def _try_lean(self, case: Case, outcome: Outcome) -> None:
        """Store a trial; choose the plan to follow when all are done."""
        own, lean = case.chosen, case.lean
        assert own is not None
        assert lean.plan is not None
        if outcome.rescues:
            case.candidates, case.leader, lean.plan = [], None, None
            return
        if outcome.timing is Timing.LEAD:
            case.leader = case.candidates[0]
            return
        case.leader = None
        lean.seconds[case.candidates.pop(0) is lean.plan].append(outcome.seconds)
        if case.candidates:
            return
        former_seconds, seconds = (_typical(lean.seconds[is_lean]) for is_lean in (False, True))
        if seconds * FASTER <= former_seconds:
            lean.former = own
            case.plan_seconds = []
            case.trials.append(Tried(lean.plan, seconds, 0, share=case.share))
            case.choose(lean.plan)
        elif len(lean.seconds[True]) < ROUNDS * (SETTLING + STEPS):
            case.candidates = _list_steps(own, lean.plan)
        else:
            lean.plan = None

    def _end_lean_trials(self, case: Case) -> bool:
        """Follow the case's own plan again, if it follows a lean one; return whether it did."""
        lean = case.lean
        if lean.former is None:
            return False
        case.trials = [each for each in case.trials if each.plan is not lean.plan]
        case.plan_seconds = []
        case.choose(lean.former)
        lean.plan = lean.former = None
        return True


def _list_steps(own: Plan, lean: Plan) -> list[Plan]:
    """Return the plans of a round's steps."""
    return [plan for plan in (own, lean) for _ in range(SETTLING + STEPS)]


def _typical(seconds: Sequence[float]) -> float:
    counted = [each for at, each in enumerate(seconds) if at % (SETTLING + STEPS) >= SETTLING]
    return statistics.median(counted)


def is_near(seconds: float, former: float) -> bool:
    """Return whether two times differ no more than two steps of one plan may."""
    return FASTER * max(seconds, former) <= min(seconds, former)


def used_bytes(plan: Plan) -> int:
    """Return the most bytes that a plan's steps are predicted to take; 0: not known."""
    prediction = plan.prediction
    return 0 if prediction is None else prediction.reserved_bytes or prediction.peak_bytes
