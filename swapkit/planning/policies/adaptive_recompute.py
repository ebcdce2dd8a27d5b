"""Adaptive recompute: plans for a memory threshold that trial steps find."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from swapkit.errors import InfeasibleBudget, InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.planner import make_plan
from swapkit.planning.selection.asking import MakePlans
from swapkit.planning.selection.cases import Case, Outcome
from swapkit.planning.selection.learner import Learner
from swapkit.texts import get_logger
from swapkit.units import format_bytes

# ---- threshold search ----------------------------------------------------------------------------
#
# The search for the memory threshold of adaptive recompute: bisection by trial steps.
#
# Each trial step runs with the policy of a threshold. If memory runs out, so that tensors must be
# swapped, the next threshold is smaller, otherwise larger, until the two meet. No policy is
# measured twice: a policy with a known result costs no step.
#
# Source:
#   MindSpeed, adaptive selective recompute: the search of its figure 1, step by step. That search
#   never ends if full recompute does not fit; this one ends with full recompute.

STEP_BYTES = 1 << 20
WATCHED_STEPS = 10  # after a threshold was found: an out-of-memory in one restarts the search


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The memory events of a step."""

    swapped_bytes: int = 0  # because memory ran out
    retries: int = 0  # allocations that succeeded only after the cache was freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The memory to plan for in the next step."""

    nbytes: int
    is_found: bool  # the search is over, as long as memory does not run out


class ThresholdSearch:
    """A bisection for the threshold. Not thread-safe."""

    def __init__(
        self,
        most_bytes: int,
        solve: Callable[[int], Hashable],
        *,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """Start with the largest threshold.

        Args:
            most_bytes: the first threshold: the device's memory, or the user's limit.
            solve: returns the policy for a threshold in bytes; equal policies do the same.
            step_bytes: resolution of the threshold.

        Raises:
            InvalidArgument: a size is not positive.
        """
        if most_bytes < step_bytes or step_bytes < 1:
            raise InvalidArgument(f"most_bytes={most_bytes}: expected at least {step_bytes}")
        self._most = most_bytes // step_bytes
        self._step_bytes = step_bytes
        self._solve = solve
        # In units of step_bytes: the largest known to run, the smallest known not to run.
        self._low = self._high = self._first_good = 0
        self._now: int | None = None
        self._is_found = False
        self._watched = 0
        self._retried = 0
        self._is_recheck = False
        self._policy: Hashable = None
        self._good: set[Hashable] = set()
        self._bad: set[Hashable] = set()

    def next(self, outcome: StepOutcome | None = None) -> Threshold:
        """Return the threshold of the next step.

        Args:
            outcome: of the step with the previous threshold; None: no step ran yet.
        """
        if self._now is None or outcome is None:
            self._now = self._most
            self._policy = self._solve(self._most * self._step_bytes)
            return self._answer()
        ran_out = self._judge(outcome)
        if self._is_found:
            self._watched += 1
            if not ran_out or self._watched > WATCHED_STEPS:
                return self._answer()
        if ran_out:
            self._bad.add(self._policy)
            self._good.discard(self._policy)
        elif self._retried == 0 and self._policy not in self._bad:
            self._good.add(self._policy)
        self._advance(ran_out=ran_out)
        return self._answer()

    def _advance(self, *, ran_out: bool) -> None:
        """Advance to a threshold whose policy has no known result."""
        while True:
            self._now = self._choose(ran_out=ran_out)
            if self._is_recheck:
                return
            self._policy = self._solve(self._now * self._step_bytes)
            if self._is_found:
                self._watched = 0
                return
            if self._policy in self._bad:
                ran_out = True
            elif self._policy in self._good:
                ran_out = False
            else:
                return

    def _choose(self, *, ran_out: bool) -> int:
        assert self._now is not None
        now = self._now
        if self._is_found:
            self._low, self._high, self._is_found = self._first_good, now, False
        if ran_out:
            self._is_recheck, self._retried = False, 0
            self._high = now
            if self._first_good >= now:
                self._first_good = 0
            if self._high <= self._low:
                self._low = 0
            self._is_found = now == 0  # even the smallest threshold runs out of memory
            return (self._low + self._high) // 2
        if self._retried and not self._is_recheck:
            self._is_recheck, self._retried = True, 0
            return now
        self._is_recheck, self._retried = False, 0
        self._low = now
        self._first_good = self._first_good or now
        self._is_found = self._high - self._low <= 1
        return self._low if self._is_found else (self._low + self._high) // 2

    def _judge(self, outcome: StepOutcome) -> bool:
        """Return whether memory ran out; a single retry needs a second step to decide."""
        if outcome.swapped_bytes > 0:
            return True
        if outcome.retries > 1 or (outcome.retries == 1 and self._is_recheck):
            return True
        self._retried += outcome.retries
        return self._retried > 1

    def _answer(self) -> Threshold:
        assert self._now is not None
        return Threshold(nbytes=self._now * self._step_bytes, is_found=self._is_found)


# ---- adaptive recompute --------------------------------------------------------------------------
#
# Adaptive recompute: plans for a memory threshold that trial steps find.
#
#   warm-up   the first steps, under rescue; the last of them is recorded
#   search    one step for each trial threshold. If memory runs out, so that tensors must be
#             swapped, the next threshold is smaller, otherwise larger, until the two meet
#   stable    the threshold that was found, until memory runs out again
#
# If a threshold is too small for any plan, the step recomputes as much as it can. Steps that differ
# from the recorded one are handled as in `learner.py`.
#
# Source:
#   MindSpeed, adaptive selective recompute, figure 1.

_log = get_logger("plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRecompute:
    """A policy with its own search.

    Attributes:
        limit_bytes: the session's limit.
        most_bytes: the first threshold.
        step_bytes: resolution of the threshold.
    """

    limit_bytes: int
    most_bytes: int
    step_bytes: int = STEP_BYTES

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return the fastest plan that only recomputes."""
        return make_plan(trace, machine, "recompute")

    def make_learner(
        self, make_plans: MakePlans, *, profile_steps: int, **_of_a_learner: float
    ) -> ThresholdLearner:
        """Return the learner of a session; its search takes as many steps as it needs."""
        return ThresholdLearner(make_plans, policy=self, profile_steps=profile_steps)


class ThresholdLearner(Learner):
    """A learner that searches for a threshold instead of comparing candidates."""

    def __init__(
        self,
        make_plans: MakePlans,
        *,
        policy: AdaptiveRecompute,
        profile_steps: int,
    ) -> None:
        """Create a learner.

        Args:
            make_plans: makes the plan for a share of the limit.
            policy: the start and the resolution of the search.
            profile_steps: steps of a case before its plan; the last of them is recorded.
        """
        super().__init__(make_plans, profile_steps=profile_steps, search_steps=1)
        self._policy = policy
        self._searches: dict[str, _ThresholdSearch] = {}  # by the signature of the steps

    def _keep(self, own: Case) -> None:
        super()._keep(own)
        self._searches = {
            signature: search
            for signature, search in self._searches.items()
            if signature in self._cases
        }

    def _plan(self, case: Case, count: int) -> None:
        """Start the search with the case's trace."""
        if case is self._general:
            super()._plan(case, count)
            return
        assert case.trace is not None
        case.chosen, case.candidates, case.why_none = None, [], ""
        try:
            search = _ThresholdSearch(case.trace, self.make_plans, self._policy)
        except InfeasibleBudget as error:
            case.why_none = str(error)
            return
        except Exception as error:  # as for any policy: the next steps have no plan
            case.why_none = f"{type(error).__name__}: {error}"
            raise
        self._searches[self._signature] = search
        case.candidates = [search.plan]

    def _try(self, case: Case, outcome: Outcome) -> None:
        """Advance to the next threshold, or end the search."""
        self._advance(case, rescues=outcome.rescues)

    def _time_plan(self, case: Case, seconds: float) -> None:  # noqa: ARG002 - overrides Learner
        """Count a step without a rescue."""
        if self._signature in self._searches:
            self._advance(case, rescues=0)

    def _retreat(self, case: Case, count: int) -> None:
        """Continue the search with smaller thresholds, because memory ran out."""
        search = self._searches.get(self._signature)
        if case is self._general or search is None:  # None: the plan was adopted
            super()._retreat(case, count)
            return
        if search.is_over:
            self._forget(case, "memory ran out with the threshold found")
            return
        former = search.threshold
        self._advance(case, rescues=1)
        if search.threshold != former:
            self.replans += 1
            self.reason = "memory ran out soon after a threshold was found: trying a smaller one"

    def _advance(self, case: Case, *, rescues: int) -> None:
        search = self._searches[self._signature]
        former = case.chosen
        search.advance(StepOutcome(swapped_bytes=rescues))
        is_found = search.threshold.is_found
        case.chosen = None
        case.candidates = [] if is_found else [search.plan]
        if is_found and search.plan is former:
            case.chosen = former
        elif is_found:
            case.choose(search.plan)


class _ThresholdSearch:
    """The search for the threshold of the steps of one trace.

    Attributes:
        plan: the plan for `threshold`.
        threshold: the threshold of the next step.
    """

    plan: Plan

    def __init__(self, trace: Trace, make_plans: MakePlans, policy: AdaptiveRecompute) -> None:
        """Start with the policy's first threshold.

        Raises:
            InfeasibleBudget: there is no plan for the session's limit.
        """
        self._trace = trace
        self._make_plans = make_plans
        self._limit_bytes = policy.limit_bytes
        self._plans: dict[Hashable, Plan] = {}  # by the storages that they recompute
        self._least: Plan | None = None  # for each threshold without a plan of its own,
        self._least_bytes = 0  # that is, each threshold below this one
        self._watched = 0
        self._search = ThresholdSearch(policy.most_bytes, self._solve, step_bytes=policy.step_bytes)
        self.threshold = self._search.next()
        _log.info("search: the first threshold is %s", format_bytes(self.threshold.nbytes))

    @property
    def is_over(self) -> bool:
        """Whether the threshold held for so long that a failure must have another cause."""
        return self._watched > WATCHED_STEPS

    def advance(self, outcome: StepOutcome) -> None:
        """Learn from a step with the threshold, and choose the next threshold."""
        former = self.threshold
        self.threshold = self._search.next(outcome)
        has_held = former.is_found and not outcome.swapped_bytes
        self._watched = self._watched + 1 if has_held else 0
        if self.threshold == former:
            return
        what = "found" if self.threshold.is_found else "next"
        _log.info(
            "threshold %s: memory %s; %s: %s",
            format_bytes(former.nbytes),
            "ran out" if outcome.swapped_bytes else "held",
            what,
            format_bytes(self.threshold.nbytes),
        )

    def _solve(self, nbytes: int) -> Hashable:
        """Store the plan for a threshold, and return the set of storages that it moves."""
        plan = self._make(nbytes)
        outline = frozenset(decision.storage for decision in plan.decisions)
        self.plan = self._plans.setdefault(outline, plan)
        return outline

    def _make(self, nbytes: int) -> Plan:
        """Return the plan for a threshold; if there is none, the plan for the least memory."""
        if self._least is not None and nbytes < self._least_bytes:
            return self._least
        try:
            return self._plan(nbytes)
        except InfeasibleBudget as error:
            if error.least_bytes > self._limit_bytes:
                raise
            self._least_bytes = error.least_bytes
        self._least = self._plan(self._least_bytes + 1)  # the float share must not round down
        return self._least

    def _plan(self, nbytes: int) -> Plan:
        share = min(1.0, nbytes / self._limit_bytes)
        return self._make_plans(self._trace, share=share, count=1)[0]
