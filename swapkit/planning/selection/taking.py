"""The part of a learner that requests plans and takes the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from swapkit.ir.plans import Plan
from swapkit.ir.traces import HostTime, Trace
from swapkit.planning.selection.asking import Asking, Found, MakePlans, MakePlansBeside
from swapkit.planning.selection.cases import ROUNDS, Asked, Case, Lean, Lengths, Request, find_best

# ---- time of the host ----------------------------------------------------------------------------
#
# The host's time for a step, fitted to host-bound steps of different plans.


def find_host_time(steps: Iterable[tuple[Plan, float]]) -> HostTime | None:
    """Return the host time that explains the steps best; None: the steps do not determine it.

    This is a least-squares fit over all subsets of terms (swaps, recomputations), restricted to
    fits without a negative time.

    Args:
        steps: plans, and the seconds of host-bound steps with them.
    """
    rows, times = [], []
    for plan, seconds in steps:
        rows.append((1, *plan.count_moved()))
        times.append(seconds)
    if len(rows) < 2:
        return None
    counts, taken = np.array(rows, dtype=np.float64), np.array(times)
    varying = [column for column in (1, 2) if np.ptp(counts[:, column]) > 0]
    if not varying or np.linalg.matrix_rank(counts[:, [0, *varying]]) <= len(varying):
        return None
    found = min(_fit_each(counts, taken, varying), key=lambda each: each[0])
    step, swap, recompute = found[1]
    return HostTime(step_seconds=step, swap_seconds=swap, recompute_seconds=recompute)


def _fit_each(
    counts: NDArray[np.float64], taken: NDArray[np.float64], varying: list[int]
) -> Iterable[tuple[float, list[float]]]:
    """Yield the error and the times of each fit, for each subset of terms besides the step."""
    choices = (itertools.combinations(varying, count) for count in range(len(varying) + 1))
    for chosen in itertools.chain.from_iterable(choices):
        columns = [0, *chosen]
        times, *_ = np.linalg.lstsq(counts[:, columns], taken, rcond=None)
        if (times >= 0).all():
            whole = np.zeros(counts.shape[1])
            whole[columns] = times
            yield float(np.sum((counts @ whole - taken) ** 2)), whole.tolist()


# ---- taking --------------------------------------------------------------------------------------

LONGER = "inputs became longer"  # the reason for another plan


class Taking:
    """The base of a learner: everything about plans before the session follows them."""

    def __init__(
        self, make_plans: MakePlans, margins: Sequence[float], clock: Callable[[], float]
    ) -> None:
        """Start without plans; see `Learner`.

        Args:
            make_plans: makes candidates.
            margins: shares of the budget that plans leave free, the preferred one first.
            clock: returns seconds.
        """
        self._make_untimed = make_plans
        self._margins = margins
        self._clock = clock
        self._asking = Asking(self)
        self._any = Lengths()  # all steps that differ from the current one only in sizes
        self._now: Case | None = None  # the case of the current step: its own or the general one
        self._cost_seconds = 0.0  # of all recordings and all planning
        self.replans = 0
        self.reason = ""  # of the last replan, for people

    @property
    def _general(self) -> Case:
        """The case of steps whose shapes occur only once."""
        return self._any.case

    def make_plans(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        """Make candidates for the case of the step that ended, and charge the time to it."""
        assert self._now is not None
        began = self._clock()
        try:
            return self._make_untimed(trace, share=share, count=count)
        finally:
            self._charge(self._now, self._clock() - began)

    def leave_free(self, share: float) -> None:
        """Request plans that leave this share of the budget free, if there are any."""
        self._margins = (share, *self._margins[-2:])

    def _charge(self, case: Case, seconds: float) -> None:
        case.cost_seconds += seconds
        self._cost_seconds += seconds

    def _plan(self, case: Case, count: int) -> None:
        """Request `count` candidates from the case's trace."""
        assert case.trace is not None
        shares = tuple(1 - margin for margin in dict.fromkeys(self._margins))
        self._ask(Asked(case, Request(trace=case.trace, count=count, shares=shares)))

    def _ask(self, asked: Asked) -> None:
        asked.case.asked, asked.since = asked, self._clock()
        self._asking.ask(asked)

    def answer(self, asked: Asked, found: Found, seconds: float) -> None:
        """Take the plans that a case has requested: see `Answers`."""
        case = asked.case
        self._charge(case, seconds)
        if case.asked is not asked:
            return  # the request is outdated
        if not found.plans and (trace := self._find_shorter(case, asked)) is not None:
            case.trace = trace
            self._plan(case, 1)
        elif asked.is_refined:
            case.asked = None
            self._take_refined(case, found)
        elif asked.is_lean:
            case.asked = None
            self._take_lean(case, found)
        elif asked.replaces and not found.plans:  # the old plans are better than none
            case.keep_plans()
            self._do_without(case)
        else:
            self._take_plans(case, asked, found)

    def _find_shorter(self, case: Case, asked: Asked) -> Trace | None:
        """Return the recorded step if there was no plan for longer ones."""
        is_first = case is self._general and not asked.replaces
        return self._any.as_recorded() if is_first else None

    def _take_plans(self, case: Case, asked: Asked, found: Found) -> None:
        is_first = case.chosen is not None or not case.trials  # of a search
        case.asked, case.chosen, case.candidates, case.plan_seconds = None, None, [], []
        case.lean = Lean()
        case.share = case.candidates_share = found.share
        case.why_none = found.why_none
        case.trace = asked.request.trace
        if is_first and len(found.plans) == 1:
            case.choose_untried(found.plans[0])
        else:
            case.trials = [] if is_first else case.trials
            case.candidates = list(found.plans)
        if asked.replaces:
            is_less = asked.replaces != LONGER
            case.retreats = ROUNDS if found.is_last else case.retreats + is_less
            self.replans += 1
            self.reason = f"{asked.replaces}: planning for {case.share:.1%} of the budget"

    def _take_refined(self, case: Case, found: Found) -> None:
        """Try a refined plan next, if it moves other storages than the plans tried so far."""
        case.candidates_share = found.share
        case.candidates = [each for each in found.plans if not case.has_tried(each)]
        self._choose(case)

    def fail(self, asked: Asked, error: BaseException) -> None:
        """Handle an error of planning: see `Answers`."""
        case = asked.case
        if case.asked is not asked:
            return
        case.asked = None
        if asked.is_refined:
            self._take_refined(case, Found(share=case.share))
        elif asked.is_lean:
            pass  # continue with the current plan
        elif asked.replaces:  # continue with the old plans
            case.keep_plans()
        elif isinstance(error, Exception):  # of a custom policy: the next steps have no plan
            case.why_none = f"{type(error).__name__}: {error}"

    @property
    def planning_seconds(self) -> float:
        """The seconds since plans for the current steps were asked for; 0: there is no request."""
        asked = None if self._now is None else self._now.asked
        return 0.0 if asked is None else self._clock() - asked.since

    def find_plan(self) -> Found:
        """Return the best plan for the current steps; wait for a plan that is being made.

        The learner itself takes such a plan only at the end of a step.
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

    def plan_beside(self, prepare: Callable[[], MakePlansBeside]) -> None:
        """Make plans in the background from now on, while steps run.

        Args:
            prepare: called on the steps' thread; returns a function that makes the same plans on
                any other thread.
        """
        self._asking.prepare = prepare

    def give_up(self) -> None:
        """Stop making plans, without waiting. Safe anywhere, also in finalizers."""
        self._asking.give_up()

    def stop(self) -> None:
        """Stop making plans, and wait for the end of a running job. On any thread."""
        self._asking.stop()

    def _do_without(self, case: Case) -> None:
        """Continue with the current plans, because there are none for less memory."""
        raise NotImplementedError

    def _choose(self, case: Case) -> None:
        """Follow the best plan if all were tried."""
        raise NotImplementedError

    def _take_lean(self, case: Case, found: Found) -> None:
        """Take the plan with the least memory within a time, if there is one."""
        raise NotImplementedError

    def _refine(self, case: Case) -> bool:
        """Request a host-aware plan if the host was the limit; return whether one was requested."""
        best = find_best(case.trials)
        if case.is_refined or not best.is_host_bound or best.rescues:
            return False
        case.is_refined = True
        bound = [(each.plan, each.seconds) for each in case.trials if each.is_host_bound]
        host = find_host_time(bound)
        if host is None:
            return False
        assert case.trace is not None
        case.trace = replace(case.trace, host=host)
        case.candidates = [best.plan]  # until the new plan arrives
        request = Request(trace=case.trace, count=1, shares=(case.share,))
        self._ask(Asked(case, request, is_refined=True))
        return True
