"""Stages of a pipeline: the times that they publish, and less memory for those that wait."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._runtime.control.board import Board, begin, once_per_group
from swapkit.errors import InvalidDocument
from swapkit.ir.plans import Plan
from swapkit.ir.traces import StagePlace
from swapkit.planning.selection.asking import MakePlans
from swapkit.planning.selection.cases import Case
from swapkit.planning.selection.lean_trials import is_near, used_bytes
from swapkit.planning.selection.learner import Learner
from swapkit.reporting.machines import format_seconds
from swapkit.texts import get_logger
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from concurrent.futures import Future

# ---- stage exchange ------------------------------------------------------------------------------
#
# Each rank of a pipeline publishes the times of its own plan, and reads now and then what the
# others have published. No rank waits: requests run on threads of their own, and their answers are
# taken at the end of a later step. A store may outlive the process group and the sessions that
# wrote to it. So each session has a *mark*, and repeats the marks that it has read: a rank believes
# only what was written after its own mark was read.

_log = get_logger("plan")
MOST_STEPS = 64  # between two readings; after news, first 1 step, then 2, and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The times of a rank's own plan, in seconds."""

    stages: tuple[int, ...]
    work_seconds: float  # of a step, without waits for other ranks
    step_seconds: float  # with them

    def __post_init__(self) -> None:
        """Check that there is a stage."""
        if not self.stages:
            raise ValueError(self)


@dataclass(frozen=True, slots=True)
class _Note:
    """What a rank has published for its stage."""

    mark: str
    marks: dict[str, str]  # that it has read, by rank
    times: StageTimes | None = None  # None: it has no plan now


class StageExchange:
    """One session's part in a pipeline. On the thread of its steps; `leave`: any thread."""

    def __init__(self, board: Board, place: StagePlace) -> None:
        """Publish nothing yet. `place`: of this rank, in the pipeline."""
        self.place = place
        self.rank = board.rank
        self._board = board
        ranks = "-".join(map(str, place.ranks))
        # Sessions at the same time have others.
        self.topic = board.reserve(f"swapkit/stages/{ranks}/{place.count}", self)
        self._note = _Note(uuid.uuid4().hex[:12], {})
        self._published: _Note | None = None
        self._notes: dict[int, _Note] = {}  # of all ranks, at the last reading
        self._found: dict[int, StageTimes] = {}  # in them
        self._answer: Future[dict[int, _Note]] | None = None
        self._wait = self._pause = 1  # steps until the next reading, and from that to the one after
        self._is_over = False

    def end_step(self, times: StageTimes | None) -> dict[int, StageTimes]:
        """Take what has arrived and ask again, if it is time; return the times of all ranks.

        Args:
            times: of this rank, with its own plan; None: it has none now.

        Returns:
            By rank; nothing: not all are known.
        """
        if self._is_over:
            return {}
        try:
            self._take(times)
            self._ask()
        except (RuntimeError, ValueError) as error:  # such as a destroyed process group
            self._is_over = True
            log = _log.warning if isinstance(error, InvalidDocument) else _log.debug
            log("rank %d plans without the other stages: %s", self.rank, error)
            return {}
        return self._found

    def leave(self) -> None:
        """Withdraw what this rank has published, without waiting. Any thread."""
        is_over, self._is_over = self._is_over, True
        self._board.release(self.topic)
        if not is_over and self._published is not None:
            try:
                begin(self._publish)
            except RuntimeError as error:  # the interpreter ends: no more threads
                _log.debug("rank %d leaves its pipeline unnoticed: %s", self.rank, error)

    def _take(self, times: StageTimes | None) -> None:
        """Take the answer of the last reading, if it is there."""
        notes, answer = self._notes, self._answer
        if answer is not None and answer.done():
            self._answer = None
            notes = answer.result()
        if times == self._note.times and notes == self._notes:
            return
        self._notes, self._wait, self._pause = notes, 0, 1
        mark, key = self._note.mark, str(self.rank)
        marks = {str(rank): each.mark for rank, each in notes.items() if rank != self.rank}
        self._note = _Note(mark, marks, times)
        # Of this session: a rank that has not read this session's mark may mean another one.
        believed = {rank: each for rank, each in notes.items() if each.marks.get(key) == mark}
        believed[self.rank] = self._note
        known = {rank: each.times for rank, each in believed.items() if each.times is not None}
        self._found = known if len(known) == len(self.place.ranks) else {}

    def _ask(self) -> None:
        """Start the next reading, if it is time and there is an answer to the last one."""
        self._wait -= 1
        if self._answer is not None or self._wait > 0:
            return
        if self._note == self._published:
            self._pause = min(2 * self._pause, MOST_STEPS)
        self._published, self._wait = self._note, self._pause
        self._answer = begin(self._exchange)

    # ---- on threads of its own -------------------------------------------------------------------

    def _publish(self) -> None:
        # Read here: a request that was made earlier may come later.
        note = _Note(self._note.mark, {}) if self._is_over else self._published
        self._board.publish(self.topic, note)

    def _exchange(self) -> dict[int, _Note]:
        self._publish()
        return self._board.read(self.topic, _Note, self.place.ranks)


find_board = once_per_group(lambda board: board)


# ---- stage plans ---------------------------------------------------------------------------------
#
# Less memory for the stages of a pipeline that wait for the slowest one.
#
# A session whose recorded step was a pipeline's publishes what its own plan takes.
# Once the times of all stages are known, the slowest one decides how long the step is: each other
# stage tries the plan with the least memory that takes no longer. Waits for other ranks do not
# count: they get shorter where the stage has more to do. All ranks find the same slowest stage from
# the same times, whenever they read them, and a stage that publishes nothing leaves all plans
# as they are.


class StagePlans:
    """One session's stage of a pipeline, if it is one. On the thread of its steps."""

    def __init__(self, prepare: Callable[[float], MakePlans] | None) -> None:
        """Join no pipeline yet.

        Args:
            prepare: takes the limit of a step in seconds, and returns a function that makes the
                plan with the least memory within it, on any thread; None: no such plans are made.
        """
        self._prepare = prepare
        self._board: Board | None = None
        self._exchange: StageExchange | None = None
        self._own: tuple[Plan, StageTimes, float] | None = None  # and the waits of its step
        self._slowest: StageTimes | None = None
        self._followed: Plan | None = None  # with less memory

    def end_step(self, learner: Learner) -> None:
        """Read the times of the other stages, and have the learner try a plan with less memory.

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
        if self._exchange is not None:
            self._exchange.leave()

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
        board = find_board() if len(place.ranks) > 1 else None
        known = self._exchange
        if known is not None and board is self._board and known.place == place:
            return known
        self.leave()  # a former process group's, or another pipeline's
        self._board, self._slowest = board, None
        self._exchange = None if board is None else StageExchange(board, place)
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
            return known[1]  # others need not know of each step
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
