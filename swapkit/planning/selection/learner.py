"""The learner of a session: it decides when to record, which plans to try, and which to follow.

For each *case*, that is, all steps with inputs of the same shapes:

    warm-up   steps under rescue; the last of them is recorded
    search    steps with each candidate plan, and once more with the one predicted to be fastest if
              another one seems to be; if the host was the limit, one more candidate that considers
              the host's time; the best plan that held the budget wins (`find_best`)
    stable    the winner, until steps differ from the recorded one, or need a rescue

Training continues while plans are made (`asking.py`): under rescue if there is no plan yet,
otherwise with the plan to be replaced. The ratio of measured to predicted times of the tried steps
corrects predictions.

A rescue shows that memory was planned too tightly. Then plans for less memory are made from the
same trace; or, if more memory was in use before the step began, a step is recorded again. A step is
also recorded again if more than one step in a row differs from the recorded one. If only sizes
differ, and from step to step, the plan is followed at any size instead. If a recording does not
help, the program changes from step to step. Then steps follow the plan as far as possible, and the
number of steps before the next recording doubles each time. `cases.py` has the rules.

Shapes that occur only once have no plan of their own. After several such steps in a row, one plan
is made for all steps that differ only in their sizes (`cases.py`).

Source:
    MindSpeed, SmartSwap: WarmUp, SearchPolicy, Stable. Here measurements decide.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable

from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.selection.asking import Given, MakePlans
from swapkit.planning.selection.cases import (
    FASTER,
    ROUNDS,
    SHARE,
    Asked,
    Case,
    Instruction,
    Lean,
    Lengths,
    Outcome,
    Request,
    Stage,
    StepMode,
    Tried,
    find_best,
)
from swapkit.planning.selection.lean_trials import LeanTrials
from swapkit.planning.selection.taking import LONGER

CASES_KEPT = 16
# After a rescue plans leave this share of the budget more free, then twice as much more, and so on.
# A learner whose plans are not checked by addresses begins with it: some free pieces are too small.
MARGIN = 0.02
EXTRA_STEPS = 2  # of a search if no candidate has held yet
STRANGE = "strange"  # the kind of all steps that have no plan of their own
STRANGERS = 4  # steps in a row without a plan of their own, before one is made for all of them
RECURRING = 4  # occurrences of such a step before it gets a plan of its own
TIMED_STEPS = 8  # steps with the chosen plan, whose median replaces the time from the search


class Learner(LeanTrials):
    """The learner of a session: it decides how each step runs, and learns from the outcome."""

    def __init__(
        self,
        make_plans: MakePlans,
        *,
        profile_steps: int,
        search_steps: int,
        margin: float = MARGIN,
        spare: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a learner.

        Args:
            make_plans: makes candidates from a recorded step, on the thread of the steps.
            profile_steps: steps of a case before its plan; the last of them is recorded.
            search_steps: most candidates to try, not counting those for less memory.
            margin: share of the budget that plans leave free at first.
            spare: the share if there is no such plan: the memory lost to unusable pieces.
            clock: returns seconds, to time planning.
        """
        super().__init__(make_plans, (margin, min(spare, margin), 0.0), clock)
        self._profile_steps = profile_steps
        self._search_steps = search_steps
        self._cases: OrderedDict[str, Case] = OrderedDict()
        self._signature = ""
        self._given = Given()
        self._own: Case | None = None  # of the current or last step
        self._lengths: OrderedDict[str, Lengths] = OrderedDict()  # by form
        self._length = 0
        self._strangers = 0
        self._seconds = 0.0  # of all steps
        self._recordings = 0

    @property
    def stage(self) -> Stage:
        """The stage of the current or last step."""
        return Stage.WARMUP if self._now is None else self._now.stage

    @property
    def kind(self) -> str:
        """The kind of the current or last step: steps of one kind follow the same plan."""
        return STRANGE if self.is_general else self._signature

    @property
    def is_general(self) -> bool:
        """Whether the current or last step uses the plan for inputs of any length."""
        return self._now is self._general

    @property
    def has_one_kind(self) -> bool:
        """Whether all steps that were recorded are of one kind."""
        return sum(each.trace is not None for each in self._cases.values()) == 1

    @property
    def case(self) -> Case | None:
        """The case of the current or last step."""
        return self._now

    def adopt(self, signature: str, trace: Trace, plan: Plan) -> None:
        """Follow an existing plan, from the first step on."""
        case = self._cases[signature] = Case(trace=trace, recordings=1)
        case.choose_untried(plan)
        case.note_progress(0)
        self._given.give(signature)

    def rename(self, former: str, signature: str) -> None:
        """Move the case of one signature to another signature."""
        if former in self._cases and signature not in self._cases:
            self._cases[signature] = self._cases.pop(former)
            self._given.rename(former, signature)

    def restart(self, reason: str) -> None:
        """Drop everything that was recorded, because all steps are other ones from now on."""
        replans = self.replans
        generals = [each.case for each in self._lengths.values()]
        for case in [*self._cases.values(), *generals]:
            self._forget(case, reason)
            case.why_none, case.is_again = "", False
        self._lengths.clear()
        self._given = Given()
        self.replans = replans + 1  # one for all cases
        self.reason = f"{reason}: recording the next step"

    # ---- before a step -------------------------------------------------------------------------

    def begin(self, signature: str, form: str = "", length: int = 0) -> Instruction:
        """Return the instruction for the step that begins; a step that never ends changes nothing.

        Args:
            signature: of the step's inputs: equal for steps that do the same.
            form: equal for steps whose inputs differ only in size.
            length: number of elements of the inputs.
        """
        self._signature = signature
        self._enter_form(form, length)
        self.rename(self._given.find(signature), signature)
        own = self._own = self._cases.get(signature) or Case()
        is_due = self._is_due(own)
        is_stranger = own.trace is None and not is_due
        is_general = is_stranger and self._has_general()
        case = self._now = self._general if is_general else own
        if case.plan is not None:
            return Instruction(
                mode=StepMode.FOLLOW,
                trace=case.trace,
                plan=case.plan,
                timing=case.timing,
                for_any_length=is_general or case.has_any_sizes,
            )
        records = case.may_be_recorded and (is_due or is_general)
        return Instruction(mode=StepMode.RECORD if records else StepMode.RESCUE)

    def _has_general(self) -> bool:
        """Return whether there is a plan for steps of any size, or one should be made."""
        general = self._general
        return general.plan is not None or (self._strangers >= STRANGERS and not general.why_none)

    def _enter_form(self, form: str, length: int) -> None:
        self._length = length
        self._any = self._lengths[form] = self._lengths.get(form) or Lengths()
        self._lengths.move_to_end(form)
        while len(self._lengths) > CASES_KEPT:
            self._lengths.popitem(last=False)

    def _is_due(self, own: Case) -> bool:
        """Return whether to record a step that has no plan.

        With more kinds than `CASES_KEPT`, each kind would be recorded again at each occurrence. So
        after that many recordings, those of new kinds must be a small share of the training.
        """
        is_small = self._cost_seconds <= SHARE * self._seconds
        can_record = own.recordings > 0 or self._recordings < CASES_KEPT or is_small
        is_served = own.steps > 0 and own.trace is None and self._general.plan is not None
        enough = max(self._profile_steps, RECURRING if is_served else 0)
        return can_record and own.steps + 1 >= enough

    # ---- after a step --------------------------------------------------------------------------

    def end(self, outcome: Outcome) -> None:
        """Learn from the step that ended, and take plans that were made in the background.

        Raises:
            Exception: an error of planning.
        """
        case, own = self._now, self._own
        if case is None or own is None:
            return
        self._keep(own)
        own.steps += 1
        self._any.see(self._length)
        self._given.end(self._signature)
        self._seconds += outcome.seconds
        if outcome.trace is not None or outcome.is_lost:
            usual = statistics.median(case.seconds) if case.seconds else outcome.seconds
            self._charge(case, max(0.0, outcome.seconds - usual))
        else:
            case.seconds.append(outcome.seconds)
        if outcome.trace is not None:
            self._take(case, outcome.trace)
        else:
            self._learn(case, outcome)
        self._asking.collect()

    def _learn(self, case: Case, outcome: Outcome) -> None:
        """Learn from a step that was not recorded, unless its case waits for plans."""
        if case.plan is None or case.asked is not None:
            return
        if case is not self._general:
            self._judge(case, outcome)
        elif (trace := self._any.grow()) is not None:
            request = Request(trace=trace, count=1, shares=(case.share,))
            self._ask(Asked(case, request, LONGER))
        elif outcome.rescues:
            self._retreat(case, 1)

    def _take(self, case: Case, trace: Trace) -> None:
        """Make plans from a new trace."""
        self._recordings += 1
        case.trace = trace
        if case is self._general:
            case.trace = self._any.record(trace, self._length)
        case.recordings += 1
        case.retreats, case.is_refined, case.doubted = 0, False, None
        # Its steps are not comparable.
        is_single = case.changes or case.has_any_sizes or case is self._general
        self._plan(case, 1 if is_single else self._search_steps)

    def _keep(self, own: Case) -> None:
        """Store the case of a step; count steps in a row without a plan of their own."""
        self._cases[self._signature] = own
        self._cases.move_to_end(self._signature)
        while len(self._cases) > CASES_KEPT:
            self._cases.popitem(last=False)
        is_stranger = own.trace is None and own.steps == 0
        self._strangers = self._strangers + 1 if is_stranger else 0

    def _judge(self, case: Case, outcome: Outcome) -> None:
        """Learn from a step that followed a plan."""
        if outcome.deviation:
            self._judge_odd(case, outcome)
            return
        if not (case.has_any_sizes and outcome.rescues):  # else it may be too large for the plan
            case.note_regular()
        is_heavier = outcome.is_heavier and not case.changes
        if case.is_trying_lean:
            self._try_lean(case, outcome)
            return
        if case.candidates:
            if outcome.rescues and is_heavier:
                self._doubt(case, is_heavier=True)
            else:
                self._try(case, outcome)
            return
        self._watch(case, outcome, is_heavier=is_heavier)

    def _watch(self, case: Case, outcome: Outcome, *, is_heavier: bool) -> None:
        """Learn from a step that followed the chosen plan."""
        case.note_held(is_rescued=outcome.rescues > 0)
        if not outcome.rescues:
            self._time_plan(case, outcome.seconds)
        elif case.has_failed and not self._end_lean_trials(case):
            self._doubt(case, is_heavier=is_heavier)

    def _judge_odd(self, case: Case, outcome: Outcome) -> None:
        """Learn from a step that left its plan."""
        if case.changes and outcome.rescues:
            self._retreat(case, 1)
        if not case.note_resized(outcome.resized_bytes):
            self._note_odd(case, outcome.deviation)

    def _doubt(self, case: Case, *, is_heavier: bool) -> None:
        """Start to replace the plan, because it needs rescues."""
        if is_heavier:
            self._forget(case, "memory ran out in steps that began with more memory in use")
        else:
            self._retreat(case, 1)

    def _try(self, case: Case, outcome: Outcome) -> None:
        """Store the trial of a candidate; choose a plan when enough candidates have run."""
        trial = case.time(outcome)
        if trial is None:
            return
        case.candidates.pop(0)
        if case.doubted is not None and case.doubted.plan is trial.plan and not trial.rescues:
            trial = min(case.doubted, trial, key=lambda each: each.seconds)
        case.trials.append(trial)
        wanted = self._count_replaced(case, trial)
        if wanted > 0:
            self._retreat(case, wanted)
            return
        if case.candidates or self._try_again(case) or not self._refine(case):
            self._choose(case)

    def _try_again(self, case: Case) -> bool:
        """Try the plan with the best prediction once more if another one seems faster.

        What slowed its trial down, such as another process, may be over. Return whether it is tried
        again: at most once per recording.
        """
        best = self._find_best(case)
        expected = min(case.trials, key=lambda each: each.predicted_seconds or math.inf)
        is_expected = expected.predicted_seconds >= FASTER * best.predicted_seconds
        if is_expected or expected.rescues or case.doubted is not None:
            return False
        case.doubted, case.slow = expected, None
        case.trials = [each for each in case.trials if each is not expected]
        case.candidates, case.candidates_share = [expected.plan], expected.share
        return True

    def _count_replaced(self, case: Case, trial: Tried) -> int:
        """Return the number of plans for less memory to try instead of the remaining candidates."""
        tried = len(case.trials)
        # A plan for more memory than others may fail.
        is_tight = any(each.plan.budget_bytes < trial.plan.budget_bytes for each in case.trials)
        if not trial.rescues or is_tight or tried >= self._search_steps + EXTRA_STEPS:
            return 0
        has_held = any(each.rescues == 0 for each in case.trials)
        return max(self._search_steps - tried, 0 if has_held else 1)

    def _find_best(self, case: Case) -> Tried:
        """Return the best trial, whose plan the session should follow."""
        return find_best(case.trials, None if case.trace is None else case.trace.host)

    def _choose(self, case: Case) -> None:
        """Follow the best plan if all were tried."""
        if not case.candidates:
            best = self._find_best(case)
            case.share = best.share
            case.choose(best.plan)

    def _time_plan(self, case: Case, seconds: float) -> None:
        """Learn the time of the chosen plan's steps, which corrects predictions."""
        trial = case.trial_of_plan
        if trial is None:
            return
        case.plan_seconds.append(seconds)
        if len(case.plan_seconds) == TIMED_STEPS:
            # Settled steps are timed on the host, which may be ahead of the device.
            least = trial.seconds if trial.is_pace else 0.0
            trial.seconds = max(least, statistics.median(case.plan_seconds))
            trial.is_known = True
            case.plan_seconds = []

    def _note_odd(self, case: Case, what: str) -> None:
        """Count a step that differed from the plan; record one after too many."""
        case.regular_steps = 0
        case.odd_steps += 1
        if case.odd_steps > case.patience:
            self._forget(case, f"{case.odd_steps} steps in a row deviated; the last: {what}")

    def _forget(self, case: Case, reason: str) -> None:
        """Drop the trace and all plans, so that the next step is recorded."""
        self.replans += 1
        self.reason = f"{reason}: recording the next step"
        case.trace, case.asked = None, None
        case.chosen, case.candidates, case.trials = None, [], []
        case.lean = Lean()
        case.odd_steps = case.regular_steps = 0
        case.cost_seconds = 0.0

    def _do_without(self, case: Case) -> None:
        """Continue with the current plans, because there are none for less memory."""
        if case is self._general or (case.has_any_sizes and case.chosen is not None):
            self._note_odd(case, "memory ran out with the plan for all shapes")
        elif case.chosen is None:
            self._choose(case)

    def _retreat(self, case: Case, count: int) -> None:
        """Request `count` plans for less memory, for at most `ROUNDS` rounds."""
        if case.retreats >= ROUNDS:
            self._do_without(case)
            return
        failed = case.plan or case.trials[-1].plan  # all plans of one round have the same budget
        if case.chosen is None:
            what = "a plan on trial needed a rescue"
        else:
            what = f"{sum(case.rescued)} of the last {len(case.rescued)} steps needed a rescue"
        assert case.trace is not None
        request = Request(
            trace=case.trace,
            count=count,
            shares=(case.share - MARGIN * (case.retreats + 1),),
            failed_bytes=failed.budget_bytes,
            failed_share=case.share,
        )
        self._ask(Asked(case, request, what))
