"""Steps with inputs of the same shapes or of any length, and when their plan is replaced."""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from swapkit.ir.plans import Plan
from swapkit.ir.traces import HostTime, Kind, Storage, Trace

# ---- outcomes ------------------------------------------------------------------------------------
#
# Instructions for a step, and its outcome.


class StepMode(enum.Enum):
    """How a session runs a step."""

    RESCUE = "rescue"  # no plan: rescue when memory fills up
    RECORD = "record"  # the same, and record the step
    FOLLOW = "follow"


class Timing(enum.Enum):
    """How a session measures a step. A device other than the CPU runs asynchronously."""

    HOST = "host"  # from start to end on the host, without waiting for the device
    LEAD = "lead"  # the same, and record the step's end on the device for the next step
    PACE = "pace"  # from the recorded end to the step's own end, for which the host waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """The instruction for the step that begins."""

    mode: StepMode
    trace: Trace | None = None  # to follow: the plan's
    plan: Plan | None = None
    for_any_length: bool = False  # whether the plan is for storages of any size
    timing: Timing = Timing.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a step."""

    seconds: float
    timing: Timing = Timing.HOST  # how `seconds` was measured; on a CPU, HOST is device time
    is_host_bound: bool = False  # whether the host was busy all the time: `Timing.PACE`
    rescues: int = 0
    deviation: str = ""  # where the step left the plan; empty: nowhere
    resized_bytes: int = 0  # of the tensor there, if only its size was unexpected
    trace: Trace | None = None  # the recorded trace
    is_lost: bool = False  # whether the step was recorded, but there is no trace to plan from
    is_heavier: bool = (
        False  # whether more memory was in use before it than before the recorded one
    )


# ---- lengths -------------------------------------------------------------------------------------
#
# Inputs of any length: one plan for all steps that differ only in sizes.
#
# Such steps run the same operators. The plan is made from one recorded step, scaled to the longest
# inputs seen so far: a plan that fits these fits all shorter ones. Sizes and times are assumed to
# grow with the inputs. If they do not, a rescue helps, and then plans for less memory.

GROWING = frozenset({Kind.ACTIVATION, Kind.INPUT})
AHEAD = 1.125  # times a length beyond the plan: the next planned one, as lengths keep growing


@dataclass(slots=True, eq=False)
class Lengths:
    """Steps whose inputs differ only in their sizes. Lengths are numbers of elements."""

    case: Case = field(default_factory=lambda: Case(recordings=RECORDINGS))
    longest: int = 0  # of all steps seen
    planned: int = 0  # the longest inputs that the plan is for
    may_grow: bool = True  # whether longer inputs may have a plan
    _trace: Trace | None = None  # as recorded,
    _recorded: int = 0  # with inputs of this length

    def see(self, length: int) -> None:
        """Count the length of a step."""
        self.longest = max(self.longest, length)

    def record(self, trace: Trace, length: int) -> Trace:
        """Store a recorded step; return the step scaled to the longest inputs."""
        self._trace, self._recorded, self.may_grow = trace, length, True
        return self._scale(self.longest)

    def as_recorded(self) -> Trace | None:
        """Return the unscaled step, after no plan was found for the scaled one; None: tried."""
        if self.planned <= self._recorded:
            return None
        self.may_grow = False
        return self._scale(self._recorded)

    def grow(self) -> Trace | None:
        """Return the step for inputs longer than planned; None: the plan covers all seen so far."""
        if not self.may_grow or self._trace is None or self.longest <= self.planned:
            return None
        return self._scale(math.ceil(self.longest * AHEAD))

    def _scale(self, length: int) -> Trace:
        assert self._trace is not None
        self.planned = length
        return scale(self._trace, length / self._recorded if self._recorded else 1.0)


def scale(trace: Trace, factor: float) -> Trace:
    """Return the step with inputs that are `factor` times as long."""
    if factor == 1.0:
        return trace
    return replace(
        trace,
        operators=tuple(
            replace(
                each,
                seconds=each.seconds * factor,
                workspace_bytes=math.ceil(each.workspace_bytes * factor),
            )
            for each in trace.operators
        ),
        storages=tuple(_scale_storage(each, factor) for each in trace.storages),
        step_seconds=trace.step_seconds * factor,
    )


def _scale_storage(storage: Storage, factor: float) -> Storage:
    if storage.kind not in GROWING:
        return storage
    return replace(storage, nbytes=math.ceil(storage.nbytes * factor))


# ---- cases ---------------------------------------------------------------------------------------
#
# The state of all steps with inputs of the same shapes, and the rules for replacing their plan.
#
# A plan is replaced only for a recurring reason, and no more often than pays:
#
#   another way   more than `patience` steps in a row differ from the recorded step
#   a rescue      `RECURRENCES` of the last `WATCHED_STEPS`; or the first rescue of a plan that is
#                 not *proven*, that is, has not held for `REGULAR_STEPS` yet
#
# Recording and planning take time from training. After `RECORDINGS` of a case, each further
# recording must wait until its time is a small share (`SHARE`) of the steps in between.
#
# Slow steps are not a reason. Garbage collection, file systems and other programs slow steps down,
# and a recording in such a phase is no better than the current one.

ROUNDS = 4  # rounds of candidates, each for less memory than the previous one
ODD_STEPS = 1  # steps in a row that go another way, before one is recorded
RECORDINGS = 3  # of one case; after that many, its steps are known to change,
PATIENCE = 8  # and one is recorded after this many odd steps, then after twice as many, and so on,
MOST_PATIENCE = 1024
REGULAR_STEPS = 8  # until this many are regular, or as many as a recording must wait for
WATCHED_STEPS = 16  # the last steps that followed the chosen plan to its end:
RECURRENCES = 2  # this many of them with a rescue are no coincidence
FASTER = 0.97  # times another step's time: a step below that is faster, not by chance
SHARE = 0.05  # of the time of steps: limit for recordings and the plans made from them


# How far the search for a plan is: `Case.progress`.
RECORDING, PLANNING, SETTLED = "recording", "planning", "plan settled"
FOLLOWING_FIRST, NO_PLAN = "following a first plan", "no plan, rescue only"


class Stage(str, enum.Enum):
    """The stage of a session."""

    WARMUP = "warmup"
    SEARCH = "search"
    STABLE = "stable"


@dataclass(slots=True)
class Tried:
    """A plan that was tried, and its measured step."""

    plan: Plan
    seconds: float
    rescues: int
    is_host_bound: bool = False  # whether `seconds` is host time, and longer than predicted
    is_known: bool = False  # whether `seconds` is the median of several steps
    is_pace: bool = False  # whether `seconds` was measured on the device
    share: float = 1.0  # of the budget that the plan is for

    @property
    def predicted_seconds(self) -> float:
        """Predicted time of the step; 0: no prediction."""
        return 0.0 if self.plan.prediction is None else self.plan.prediction.step_seconds

    @property
    def device_seconds(self) -> float:
        """Predicted time of the device; 0: no prediction."""
        return 0.0 if self.plan.prediction is None else self.plan.prediction.seconds


def find_best(trials: Sequence[Tried], host: HostTime | None = None) -> Tried:
    """Return the trial to follow: the one with the fewest rescues, then the fastest.

    If times differ by no more than two steps of one plan may, the prediction decides. `host`: the
    host's time, which then counts for all trials.
    """
    fewest = min(trial.rescues for trial in trials)
    held = [trial for trial in trials if trial.rescues == fewest]
    enough = min(trial.seconds for trial in held) / FASTER
    near = [trial for trial in held if trial.seconds <= enough]
    return min(near, key=lambda trial: (_predict(trial, host), trial.seconds))


def _predict(trial: Tried, host: HostTime | None) -> float:
    seconds = trial.predicted_seconds
    if host is not None:
        swapped, recomputed = trial.plan.count_moved()
        seconds = max(seconds, host.of(swapped=swapped, recomputed=recomputed))
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for plans."""

    trace: Trace
    count: int
    shares: tuple[float, ...]  # of the budget: the first share that has plans is used
    # Budget of the plans that needed too much, in bytes and as a share; 0: there are none.
    failed_bytes: int = 0
    failed_share: float = 0.0
    # As `asking.MakePlans`; None: the session's function that makes candidates.
    make_plans: Callable[..., tuple[Plan, ...]] | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """A request of a case. Compared by identity."""

    case: Case
    request: Request
    replaces: str = ""  # why the current plans are replaced; empty: there are none
    is_refined: bool = False  # whether this asks for one more candidate, from measured steps
    is_lean: bool = False  # whether this asks for the plan with the least memory within a time
    since: float = 0.0  # when it was asked, on the learner's clock
    first: Plan | None = None  # found quickly, by the thread that makes the plans;
    early: Plan | None = None  # the same once steps follow it until there is an answer

    @property
    def is_first(self) -> bool:
        """Whether steps have no plan until this is answered."""
        return not (self.replaces or self.is_refined or self.is_lean)


@dataclass(slots=True)
class Lean:
    """The plan with the least memory within a time, and the plan that it replaces."""

    most_seconds: float = 0.0  # of a step; 0: no such plan was asked for
    plan: Plan | None = None  # None: there is none, or it did not hold
    former: Plan | None = None  # the case's own plan, if the case follows the lean one
    seconds: dict[bool, list[float]] = field(default_factory=dict)  # of trials; True: lean


@dataclass(slots=True)
class Case:
    """The state of all steps with inputs of the same shapes."""

    steps: int = 0
    trace: Trace | None = None
    candidates: list[Plan] = field(default_factory=list)
    candidates_share: float = 1.0  # of the budget that the candidates are for
    trials: list[Tried] = field(default_factory=list)
    chosen: Plan | None = None
    asked: Asked | None = None  # the open request for plans
    why_none: str = ""  # why there cannot be a plan
    share: float = 1.0  # of the budget to plan for: the chosen plan's, if there is one
    retreats: int = 0  # plans for less memory, since the recording
    recordings: int = 0  # since steps were regular
    cost_seconds: float = 0.0  # of recording it, lost recordings included, and of all plans since
    is_again: bool = False  # whether a step is recorded again: its times or memory are no model
    odd_steps: int = 0  # in a row, that went another way
    resized_bytes: int = 0  # of the tensor with which the last step left the plan; 0: none did
    has_any_sizes: bool = False  # whether its steps differ in the sizes of what they save
    regular_steps: int = 0  # in a row, that did not
    held_steps: int = 0  # regular steps with the chosen plan and without a rescue
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WATCHED_STEPS))
    rescued: deque[bool] = field(default_factory=lambda: deque(maxlen=WATCHED_STEPS))
    plan_seconds: list[float] = field(default_factory=list)  # times of steps with the chosen plan
    is_refined: bool = False  # whether a plan that considers the host's time was requested
    leader: Plan | None = None  # the candidate of the last step, which lets the host get ahead
    slow: tuple[Plan, float] | None = None  # a candidate that is timed again, and its first time
    doubted: Tried | None = None  # a trial whose plan is tried once more
    lean: Lean = field(default_factory=Lean)
    noted: str = ""  # the progress after its last step,
    since_step: int = 0  # and the number of the session's steps after which that began

    @property
    def is_settled(self) -> bool:
        """Whether the search for a plan is over."""
        return self.chosen is not None or bool(self.why_none)

    @property
    def may_be_recorded(self) -> bool:
        """Whether a recording could lead to a plan: not during planning from the last one."""
        return not self.why_none and self.asked is None

    @property
    def changes(self) -> bool:
        """Whether its steps are known to differ."""
        return self.recordings >= RECORDINGS

    @property
    def patience(self) -> int:
        """The number of steps in a row that may go another way before one is recorded."""
        if not self.changes:
            return ODD_STEPS
        doubled = min(MOST_PATIENCE, PATIENCE << min(self.recordings - RECORDINGS, 16))
        return max(doubled, self.waiting_steps)

    @property
    def waiting_steps(self) -> int:
        """The number of steps after which the last recording costs no more than its share."""
        typical = statistics.median(self.seconds) if self.seconds else 0.0
        return math.ceil(self.cost_seconds / (SHARE * typical)) if typical > 0 else 0

    @property
    def plan(self) -> Plan | None:
        """The plan of the next step; None: there is none."""
        if self.asked is not None and not self.asked.is_refined:
            return self.chosen or self.asked.early
        return self.candidates[0] if self.candidates else self.chosen

    @property
    def is_trying_lean(self) -> bool:
        """Whether its candidates are its own plan and one with less memory."""
        return self.lean.plan is not None and bool(self.candidates)

    @property
    def own(self) -> Plan | None:
        """The plan of its own search, whether or not it follows a leaner one; None: no plan yet."""
        return self.lean.former or self.chosen

    @property
    def trial_of_plan(self) -> Tried | None:
        """The trial of the chosen plan, as long as its time is that of a single step."""
        found = (each for each in self.trials if each.plan is self.chosen and not each.is_known)
        return next(found, None)

    @property
    def pace(self) -> float:
        """The typical ratio of measured to predicted time of the tried steps."""
        held = [each for each in self.trials if not each.rescues and each.predicted_seconds > 0]
        known = [each for each in held if each.is_known] or held
        ratios = [each.seconds / each.predicted_seconds for each in known]
        return statistics.median(ratios) if ratios else 1.0

    @property
    def stage(self) -> Stage:
        """The stage of its steps."""
        if self.is_settled:
            return Stage.STABLE
        asked = self.asked
        has_plan = asked is None or asked.early is not None or bool(self.trials)
        return Stage.SEARCH if self.trace is not None and has_plan else Stage.WARMUP

    @property
    def progress(self) -> str:
        """What its next step does for a plan, as the start of a sentence."""
        if self.is_settled:
            return NO_PLAN if self.chosen is None else SETTLED
        if self.asked is not None and not self.asked.is_refined:
            return PLANNING if self.asked.early is None else FOLLOWING_FIRST
        if self.candidates:
            done = len(self.trials)
            return f"trying plan {done + 1} of {done + len(self.candidates)}"
        return RECORDING

    def note_progress(self, steps: int) -> bool:
        """Note its progress after a number of the session's steps; return whether it changed."""
        progress = self.progress
        if progress == self.noted:
            return False
        self.noted, self.since_step = progress, steps
        return True

    @property
    def timing(self) -> Timing:
        """The timing of its next step; only a step with a candidate needs more than HOST."""
        if self.asked is not None or not self.candidates:
            return Timing.HOST
        return Timing.PACE if self.leader is self.candidates[0] else Timing.LEAD

    def time(self, outcome: Outcome) -> Tried | None:
        """Return the trial of the current candidate; None: try the candidate once more.

        The time that counts is the pace of steps in a row, in which the host gets ahead of the
        device. The first steps with a plan map memory. So a candidate that seems slower than
        predicted gets two more steps.
        """
        plan, self.leader = self.candidates[0], None
        is_pace = outcome.timing is Timing.PACE
        tried = Tried(
            plan, outcome.seconds, outcome.rescues, share=self.candidates_share, is_pace=is_pace
        )
        if outcome.rescues or outcome.timing is Timing.HOST:
            return tried
        if outcome.timing is Timing.LEAD:
            self.leader = plan
            return None
        predicted = tried.device_seconds
        if self.slow is not None and self.slow[0] is plan:
            tried.seconds = min(tried.seconds, self.slow[1])
        elif tried.seconds * FASTER > predicted:
            self.slow = plan, tried.seconds
            return None
        tried.is_host_bound = outcome.is_host_bound and tried.seconds * FASTER > predicted
        return tried

    def has_tried(self, plan: Plan) -> bool:
        """Return whether a plan with the same moves was tried."""
        return any(each.plan.outline() == plan.outline() for each in self.trials)

    def choose(self, plan: Plan) -> None:
        """Follow a plan from now on, as not yet proven."""
        self.chosen = plan
        self.held_steps = 0
        self.rescued.clear()

    def choose_untried(self, plan: Plan) -> None:
        """Follow a plan without a trial; its predicted time counts until its steps are timed."""
        tried = Tried(plan, 0.0, 0, share=self.share)
        tried.seconds = self.pace * tried.predicted_seconds
        self.trials = [tried]
        self.choose(plan)

    def keep_plans(self) -> None:
        """Keep the current plans, because there are none for less memory, and stop asking."""
        self.asked = None
        self.retreats = ROUNDS

    def note_regular(self) -> None:
        """Count a step that ran as recorded."""
        self.odd_steps = self.resized_bytes = 0
        self.regular_steps += 1
        if self.has_any_sizes:
            return  # such steps need a rescue now and then: another recording does not help
        if self.regular_steps >= max(REGULAR_STEPS, self.waiting_steps):
            self.recordings = min(self.recordings, 1)

    def note_resized(self, nbytes: int) -> bool:
        """Note the bytes of the tensor with which a step left the plan only for its size; 0: none.

        Return whether sizes differ from step to step, as where tokens are routed: a third size in a
        row. The next steps then follow the plan at any size. A second size may be a lasting change.
        """
        former, self.resized_bytes = self.resized_bytes, nbytes
        is_third = bool(former and nbytes) and former != nbytes
        if is_third:
            self.has_any_sizes, self.odd_steps = True, 0
        return is_third

    def note_held(self, *, is_rescued: bool) -> None:
        """Record whether the chosen plan held in a regular step."""
        self.rescued.append(is_rescued)
        self.held_steps += not is_rescued

    @property
    def has_failed(self) -> bool:
        """Whether the rescues of the chosen plan are no coincidence."""
        is_proven = self.held_steps >= REGULAR_STEPS
        return sum(self.rescued) >= (RECURRENCES if is_proven else 1)
