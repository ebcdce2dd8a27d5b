"""Plans that a learner asks for, and takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit.planning.selection.asking import Asking, Found
from swapkit.planning.selection.cases import ROUNDS, Asked, Case, Request, find_best
from swapkit.planning.selection.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.asking import MakePlans

LONGER = "inputs became longer"  # why there is to be another plan


class Taking:
    """What a learner has to do with plans before they are followed."""

    def __init__(
        self, make_plans: MakePlans, margins: Sequence[float], clock: Callable[[], float]
    ) -> None:
        """Begin with none; see `Learner`.

        Args:
            make_plans: makes candidates.
            margins: shares of the budget that plans leave free, the best first.
            clock: tells seconds.
        """
        self._make_untimed = make_plans
        self._margins = margins
        self._clock = clock
        self._asking = Asking(self)
        self._any = Lengths()  # of the step that runs: all that are as it is but for their sizes
        self._now: Case | None = None  # what decides about the step: its own case, or that of all
        self._cost_seconds = 0.0  # of all recordings and all planning
        self.replans = 0
        self.reason = ""  # of the last one, for people

    @property
    def _general(self) -> Case:
        """What is known of steps whose shapes come once."""
        return self._any.case

    def make_plans(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        """Make candidates for the case of the step that ended: the time is a cost of its trace."""
        assert self._now is not None
        began = self._clock()
        try:
            return self._make_untimed(trace, share=share, count=count)
        finally:
            self._charge(self._now, self._clock() - began)

    def _charge(self, case: Case, seconds: float) -> None:
        case.cost_seconds += seconds
        self._cost_seconds += seconds

    def _plan(self, case: Case, count: int) -> None:
        """Have so many candidates made from the trace at hand."""
        assert case.trace is not None
        shares = tuple(1 - margin for margin in dict.fromkeys(self._margins))
        self._ask(Asked(case, Request(trace=case.trace, count=count, shares=shares)))

    def _ask(self, asked: Asked) -> None:
        asked.case.asked = asked
        self._asking.ask(asked)

    def answer(self, asked: Asked, found: Found, seconds: float) -> None:
        """Take the plans that a case has asked for: see `Answers`."""
        case = asked.case
        self._charge(case, seconds)
        if case.asked is not asked:
            return  # its steps are others by now
        if not found.plans and (trace := self._find_shorter(case, asked)) is not None:
            case.trace = trace
            self._plan(case, 1)
        elif asked.is_refined:
            case.asked = None
            self._take_refined(case, found)
        elif asked.replaces and not found.plans:  # what there was is better than nothing
            case.keep_plans()
            self._do_without(case)
        else:
            self._take_plans(case, asked, found)

    def _find_shorter(self, case: Case, asked: Asked) -> Trace | None:
        """Return the recorded step if there was no plan for longer ones."""
        is_first = case is self._general and not asked.replaces
        return self._any.as_recorded() if is_first else None

    def _take_plans(self, case: Case, asked: Asked, found: Found) -> None:
        if case.chosen is not None:
            case.trials = []
        case.asked, case.chosen, case.candidates, case.looks = None, None, [], []
        case.share = case.candidates_share = found.share
        case.why_none = found.why_none
        case.trace = asked.request.trace
        if len(found.plans) == 1 and not case.trials:
            case.choose(found.plans[0])
        else:
            case.candidates = list(found.plans)
        if asked.replaces:
            is_less = asked.replaces != LONGER
            case.retreats = ROUNDS if found.is_last else case.retreats + is_less
            self.replans += 1
            self.reason = f"{asked.replaces}: plans for {case.share:.1%} of the budget"

    def _take_refined(self, case: Case, found: Found) -> None:
        """Let a plan that minds what steps have shown have its turn if it is another one."""
        case.candidates_share = found.share
        case.candidates = [each for each in found.plans if not case.has_tried(each)]
        self._choose(case)

    def fail(self, asked: Asked, error: BaseException) -> None:
        """Note that plans could not be made: see `Answers`."""
        case = asked.case
        if case.asked is not asked:
            return
        case.asked = None
        if asked.is_refined:
            self._take_refined(case, Found(share=case.share))
        elif asked.replaces:  # what held goes on
            case.keep_plans()
        elif isinstance(error, Exception):  # a user's policy: the next steps do without
            case.why_none = f"{type(error).__name__}: {error}"

    def find_plan(self) -> Found:
        """Return the best plan there is for the steps that run; wait for one that is being made.

        Nothing is taken up: that is for the end of a step.
        """
        case = self._now
        if case is None:
            return Found(share=0.0)
        held = [each for each in case.trials if each.rescues == 0]
        if case.chosen is not None:
            plans = [case.chosen]
        elif held:
            plans = [find_best(held).plan]
        else:
            plans = case.candidates
        if plans:
            return Found(share=case.share, plans=tuple(plans[:1]))
        return self._asking.wait_for(case) or Found(share=case.share, why_none=case.why_none)

    def plan_beside(self, prepare: Callable[[], MakePlans]) -> None:
        """Let steps go on while plans are made.

        Args:
            prepare: returns, on the thread of the steps, what makes the same plans on any other.
        """
        self._asking.prepare = prepare

    def give_up(self) -> None:
        """Let no more plans be made. Anywhere, in finalizers too."""
        self._asking.give_up()

    def stop(self) -> None:
        """Likewise, and wait until none are made. Any thread."""
        self._asking.stop()

    def _do_without(self, case: Case) -> None:
        """Go on with what there is, since there are no plans for less memory."""
        raise NotImplementedError

    def _choose(self, case: Case) -> None:
        """Follow the best plan if all were tried."""
        raise NotImplementedError
