"""What is known of the steps with inputs of the same shapes, and when their plan is doubted.

A plan is given up for a reason that has come again, and no more often than pays:

    another way   more than `patience` steps in a row did something else than was recorded
    a rescue      `RECURRENCES` of the last `WATCHED_STEPS`; the first one of a plan that is not
                  *proven*, that has not held for `REGULAR_STEPS` yet

Recording and planning take seconds from training. After `RECORDINGS` of a case, further ones have
to wait until they are a small share (`SHARE`) of the steps in between.

How long steps take is no reason. Collectors, file systems and other programs slow them down, and
what is recorded meanwhile is no better than what is known.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapkit.planning.selection.outcomes import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import HostTime, Trace
    from swapkit.planning.selection.outcomes import Outcome

ROUNDS = 4  # of candidates, each for less memory than the one before
ODD_STEPS = 1  # that go another way in a row, before one is recorded
RECORDINGS = 3  # of one case; after that it is known to change from step to step,
PATIENCE = 8  # and recorded after so many steps, then twice as many, and so on,
MOST_PATIENCE = 1024
REGULAR_STEPS = 8  # until so many went as planned, or as many as a recording has to wait for
WATCHED_STEPS = 16  # the latest ones that followed the chosen plan to its end:
RECURRENCES = 2  # so many of them with a rescue are not by chance
FASTER = 0.97  # times what another step took: less is no chance
SHARE = 0.05  # of the time of steps: what recordings may take, with all plans made from them


class Stage(str, enum.Enum):
    """Where a session is."""

    WARMUP = "warmup"
    SEARCH = "search"
    STABLE = "stable"


@dataclass(slots=True)
class Tried:
    """How a plan did."""

    plan: Plan
    seconds: float
    rescues: int
    is_host_bound: bool = False  # whether the time is the host's, and longer than was predicted
    is_known: bool = False  # whether the time is the median of several steps
    moving_seconds: float = 0.0  # of the step, in moves of free memory
    share: float = 1.0  # of the budget that the plan is for

    @property
    def predicted_seconds(self) -> float:
        """What was predicted for it; 0: nothing was."""
        return 0.0 if self.plan.prediction is None else self.plan.prediction.step_seconds

    @property
    def device_seconds(self) -> float:
        """What was predicted for the device; 0: nothing was."""
        return 0.0 if self.plan.prediction is None else self.plan.prediction.seconds


def find_best(trials: Sequence[Tried], host: HostTime | None = None) -> Tried:
    """Return the one to follow: with the fewest rescues, then by time.

    Between times that two steps of one plan may differ by, the prediction decides, together with
    the moves of free memory, which no prediction knows. `host`: what the host takes, which then
    counts for all of them.
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
    return seconds + trial.moving_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Plans that are wanted."""

    trace: Trace
    count: int
    shares: tuple[float, ...]  # of the budget: the first that there are plans for
    # What plans that needed too much were for, in bytes and as a share; 0: there are none.
    failed_bytes: int = 0
    failed_share: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request of a case. Compared by identity."""

    case: Case
    request: Request
    replaces: str = ""  # what is wrong with the plans at hand; empty: there are none
    is_refined: bool = False  # whether a plan is to mind what steps have shown: one more to try


@dataclass(slots=True)
class Case:
    """What is known of the steps with inputs of the same shapes."""

    steps: int = 0
    trace: Trace | None = None
    candidates: list[Plan] = field(default_factory=list)
    candidates_share: float = 1.0  # of the budget that these are for
    trials: list[Tried] = field(default_factory=list)
    chosen: Plan | None = None
    asked: Asked | None = None  # for which plans, which are not there yet
    why_none: str = ""  # why there is no plan, if there cannot be one
    share: float = 1.0  # of the budget that is planned for: the chosen plan's, if there is one
    retreats: int = 0  # plans for less, since it was recorded
    recordings: int = 0  # since steps went as planned
    cost_seconds: float = 0.0  # of the last one, and of all plans made from it, for less too
    is_again: bool = False  # whether a step is recorded once more, since its times were doubtful
    odd_steps: int = 0  # that went another way, in a row
    regular_steps: int = 0  # that did not, in a row
    held_steps: int = 0  # of these, with the chosen plan and without a rescue
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WATCHED_STEPS))
    rescued: deque[bool] = field(default_factory=lambda: deque(maxlen=WATCHED_STEPS))
    looks: list[float] = field(default_factory=list)  # at the chosen plan: seconds
    is_refined: bool = False  # whether a plan was asked for that minds the host's time, too
    roomier: int = 0  # plans asked for that leave more free, so that less free memory is moved
    leader: Plan | None = None  # the candidate whose step was the latest, to get the host ahead
    slow: tuple[Plan, float] | None = None  # a candidate that is timed once more, with its pace

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is tried."""
        return self.chosen is not None or bool(self.why_none)

    @property
    def may_be_recorded(self) -> bool:
        """Whether a recording could lead to a plan: not while one is made of the last."""
        return not self.why_none and self.asked is None

    @property
    def changes(self) -> bool:
        """Whether its steps are known to differ."""
        return self.recordings >= RECORDINGS

    @property
    def patience(self) -> int:
        """How many steps in a row may go another way before one is recorded."""
        if not self.changes:
            return ODD_STEPS
        doubled = min(MOST_PATIENCE, PATIENCE << min(self.recordings - RECORDINGS, 16))
        return max(doubled, self.waiting_steps)

    @property
    def waiting_steps(self) -> int:
        """Of how many steps the last recording is no more than its share."""
        typical = statistics.median(self.seconds) if self.seconds else 0.0
        return math.ceil(self.cost_seconds / (SHARE * typical)) if typical > 0 else 0

    @property
    def plan(self) -> Plan | None:
        """What its next step follows."""
        if self.asked is not None and not self.asked.is_refined:
            return self.chosen
        return self.candidates[0] if self.candidates else self.chosen

    @property
    def looked_at(self) -> Tried | None:
        """The trial of the chosen plan, as long as its time is a single step's."""
        found = (each for each in self.trials if each.plan is self.chosen and not each.is_known)
        return next(found, None)

    @property
    def pace(self) -> float:
        """How long steps that were tried have taken, by what was predicted for them."""
        held = [each for each in self.trials if not each.rescues and each.predicted_seconds > 0]
        known = [each for each in held if each.is_known] or held
        ratios = [each.seconds / each.predicted_seconds for each in known]
        return statistics.median(ratios) if ratios else 1.0

    @property
    def stage(self) -> Stage:
        """Where its steps are."""
        if self.is_settled:
            return Stage.STABLE
        is_known = self.trace is not None and (self.asked is None or bool(self.trials))
        return Stage.SEARCH if is_known else Stage.WARMUP

    @property
    def timing(self) -> Timing:
        """How the time of its next step is taken: that of one with a candidate decides."""
        if self.asked is not None or not self.candidates:
            return Timing.HOST
        return Timing.PACE if self.leader is self.candidates[0] else Timing.LEAD

    def time(self, outcome: Outcome) -> Tried | None:
        """Return how the candidate did that was tried; None: it is to be tried once more.

        What counts is the pace of steps in a row, for which the host can get ahead of the device.
        First steps with a plan map or move memory: one that seems slower than predicted has two
        more, and on a CPU a plan that leaves more free one more if it seems slower than others.
        """
        plan, self.leader = self.candidates[0], None
        tried = Tried(
            plan,
            outcome.seconds,
            outcome.rescues,
            moving_seconds=outcome.moving_seconds,
            share=self.candidates_share,
        )
        if outcome.rescues or (outcome.timing is Timing.HOST and not self.roomier):
            return tried
        if outcome.timing is Timing.LEAD:
            self.leader = plan
            return None
        predicted = tried.device_seconds
        expected = self._fastest if outcome.timing is Timing.HOST else predicted
        if self.slow is not None and self.slow[0] is plan:
            tried.seconds = min(tried.seconds, self.slow[1])
        elif tried.seconds * FASTER > expected:
            self.slow = plan, tried.seconds
            return None
        tried.is_host_bound = outcome.is_host_bound and tried.seconds * FASTER > predicted
        return tried

    @property
    def _fastest(self) -> float:
        """The seconds of the fastest step that was tried."""
        return min(each.seconds for each in self.trials)

    def has_tried(self, plan: Plan) -> bool:
        """Whether a plan that moves the same was tried."""
        return any(each.plan.outline() == plan.outline() for each in self.trials)

    def choose(self, plan: Plan) -> None:
        """Follow a plan from now on, which has to prove itself."""
        self.chosen = plan
        self.held_steps = 0
        self.rescued.clear()

    def keep_plans(self) -> None:
        """Go on as before, since there are no plans for less memory; look for none any more."""
        self.asked = None
        self.retreats = ROUNDS

    def note_regular(self) -> None:
        """Note a step that went as recorded."""
        self.odd_steps = 0
        self.regular_steps += 1
        if self.regular_steps >= max(REGULAR_STEPS, self.waiting_steps):
            self.recordings = min(self.recordings, 1)

    def note_held(self, *, is_rescued: bool) -> None:
        """Note whether the chosen plan held in such a step."""
        self.rescued.append(is_rescued)
        self.held_steps += not is_rescued

    @property
    def has_failed(self) -> bool:
        """Whether the chosen plan needed a rescue for no passing reason."""
        is_proven = self.held_steps >= REGULAR_STEPS
        return sum(self.rescued) >= (RECURRENCES if is_proven else 1)
