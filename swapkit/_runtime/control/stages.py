"""Stages of a pipeline: the times that they publish, and less memory for those that wait."""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._runtime.control.rank_store import OnePerGroup, SharedStore, parse_said
from swapkit.errors import InvalidDocument
from swapkit.planning.selection.lean_trials import is_near, used_bytes
from swapkit.reporting.machines import format_seconds
from swapkit.texts import get_logger
from swapkit.units import format_bytes, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swapkit._runtime.control.rank_store import Answer
    from swapkit._runtime.torch_compat.internals import Store
    from swapkit.ir.plans import Plan
    from swapkit.ir.stages import StagePlace
    from swapkit.planning.selection.asking import MakePlans
    from swapkit.planning.selection.cases import Case
    from swapkit.planning.selection.learner import Learner

# ---- stage exchange ------------------------------------------------------------------------------
#
# What the stages of a pipeline tell each other: the time that each takes for its step.
#
# Each rank of a pipeline publishes the times of its own plan in the store of the default process
# group, and looks now and then for what the others have published. No rank waits: requests run on
# threads of their own, and their answers are taken at the end of a later step. A store may outlive
# the process group and the sessions that wrote to it. So each session has a *mark*, and repeats the
# marks that it has read: a rank believes only what was written after its own mark was read.

_log = get_logger(__name__)
MOST_SECONDS = 1e9  # that a rank may claim for a step; an integer may not even fit a float
MOST_STEPS = 64  # between two looks; after news, first 1 step, then 2, and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The times of a rank's own plan, in seconds."""

    stages: tuple[int, ...]
    work_seconds: float  # of a step, without waits for other ranks
    step_seconds: float  # with them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a rank has published."""

    mark: str
    heard: Mapping[str, str]  # the marks that it has read, by rank
    times: StageTimes | None  # None: it has no plan now


def _parse(text: bytes, rank: int) -> _Said:
    """Parse what a rank has published.

    Raises:
        InvalidDocument: the text has another format.
    """
    try:
        found = parse_said(text)
    except InvalidDocument:
        found = None
    match found:
        case {"mark": str(mark), "heard": dict(heard), "times": None}:
            return _Said(mark=mark, heard=heard, times=None)
        case {"mark": str(mark), "heard": dict(heard), "times": [[*stages], work, step]} if (
            stages and all(map(_is_count, stages)) and _is_time(work) and _is_time(step)
        ):
            times = StageTimes(stages=tuple(stages), work_seconds=work, step_seconds=step)
            return _Said(mark=mark, heard=heard, times=times)
    raise InvalidDocument(
        f"rank {rank} published {show(text)} for its stage of the pipeline, which this version of "
        "swapkit cannot read. Use the same version on all ranks"
    )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= MOST_SECONDS


class StageExchange:
    """One session's part in a pipeline. On the thread of its steps; `leave`: any thread."""

    def __init__(self, store: SharedStore, place: StagePlace, name: str, rank: int) -> None:
        """Publish nothing yet.

        Args:
            store: shared by all ranks.
            place: of this rank, in the pipeline.
            name: of the pipeline in the store, the same on all its ranks.
            rank: this rank.
        """
        self.place = place
        self.name = name
        self.rank = rank
        self._store = store
        self._mark = uuid.uuid4().hex[:12]
        self._times: StageTimes | None = None
        self._heard: dict[str, str] = {}
        self._texts: list[bytes] = []  # of all ranks, at the last look
        self._found: dict[int, StageTimes] = {}  # in them
        self._answer: Answer[list[bytes]] | None = None
        self._written = ""  # what the latest request writes
        self._wait = self._pause = 1  # steps until the next look, and from that to the one after
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
            found = self._take(times)
            self._ask()
        except InvalidDocument as error:
            self._is_over = True
            _log.warning("rank %d plans without the other stages: %s", self.rank, error)
        except (RuntimeError, ValueError) as error:  # such as a destroyed process group
            self._is_over = True
            _log.debug("rank %d plans without the other stages: %s", self.rank, error)
        else:
            return found
        return {}

    def leave(self) -> None:
        """Withdraw what this rank has said, without waiting. Any thread."""
        if self._is_over or not self._written:
            self._is_over = True
            return
        self._is_over = True
        try:
            self._store.begin(self._write)
        except RuntimeError as error:  # the interpreter ends: no more threads
            _log.debug("rank %d leaves its pipeline unheard: %s", self.rank, error)

    def _take(self, times: StageTimes | None) -> dict[int, StageTimes]:
        """Take the answer of the last look, if it is there; return the times of all ranks."""
        texts, answer = self._texts, self._answer
        if answer is not None and not answer.is_awaited:
            self._answer = None
            texts = answer.take()
        if times != self._times or texts != self._texts:
            self._times, self._texts = times, texts
            self._wait, self._pause = 0, 1
            self._found = self._read()
        return self._found

    def _read(self) -> dict[int, StageTimes]:
        """Return the times of all ranks; nothing: not all are known."""
        said = {
            rank: _parse(text, rank)
            for rank, text in zip(self.place.ranks, self._texts, strict=False)  # none: no answer
            if rank != self.rank and text
        }
        self._heard = {str(rank): each.mark for rank, each in said.items()}
        # Of this session: a rank that has not read this session's mark may speak of another one.
        known = {
            rank: each.times
            for rank, each in said.items()
            if each.times is not None and each.heard.get(str(self.rank)) == self._mark
        }
        if self._times is not None:
            known[self.rank] = self._times
        return known if len(known) == len(self.place.ranks) else {}

    def _ask(self) -> None:
        """Start the next look, if it is time and there is an answer to the last one."""
        self._wait -= 1
        if self._answer is not None or self._wait > 0:
            return
        text = self._text()
        if text == self._written:
            self._pause = min(2 * self._pause, MOST_STEPS)
        self._written, self._wait = text, self._pause
        self._answer = self._store.begin(self._look)

    def _text(self) -> str:
        times = self._times
        shown = None if times is None else [times.stages, times.work_seconds, times.step_seconds]
        return json.dumps({"mark": self._mark, "heard": self._heard, "times": shown})

    # ---- requests to the store, on threads of their own ------------------------------------------

    def _key(self, rank: int) -> str:
        return f"{self.name}/rank-{rank}"

    def _write(self, store: Store) -> None:
        # Read here: a request that was made earlier may come later.
        store.set(self._key(self.rank), "" if self._is_over else self._written)

    def _look(self, store: Store) -> list[bytes]:
        self._write(store)
        keys = [self._key(rank) for rank in self.place.ranks]
        return store.multi_get(keys) if store.check(keys) else []


class Pipelines:
    """The pipelines of one rank in one process group. Any thread."""

    def __init__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> None:
        """Begin without sessions.

        Args:
            find_store: returns the store that all ranks share.
            rank: this rank.
            count: the number of ranks.
        """
        del count
        self.rank = rank
        self._store = SharedStore(find_store)
        self._lock = threading.Lock()
        # Weak references: a session that is dropped never calls `leave`.
        self._exchanges: weakref.WeakSet[StageExchange] = weakref.WeakSet()

    def join(self, place: StagePlace) -> StageExchange:
        """Return the part of a session in a pipeline; sessions at the same time have others."""
        with self._lock:
            taken = {each.name for each in self._exchanges}
            ranks = "-".join(map(str, place.ranks))
            start, number = f"swapkit/stages/{ranks}/{place.count}", 0
            while f"{start}/{number}" in taken:
                number += 1
            made = StageExchange(self._store, place, f"{start}/{number}", self.rank)
            self._exchanges.add(made)
            return made

    def leave(self, exchange: StageExchange) -> None:
        """End a session's part."""
        with self._lock:
            self._exchanges.discard(exchange)
        exchange.leave()


_pipelines = OnePerGroup(Pipelines)


def find_pipelines() -> Pipelines | None:
    """Return this rank's pipelines; None: there are no other ranks."""
    return _pipelines.find()


# ---- stage plans ---------------------------------------------------------------------------------
#
# Less memory for the stages of a pipeline that wait for the slowest one.
#
# A session whose recorded step was a pipeline's tells the other stages what its own plan takes.
# Once the times of all stages are known, the slowest one decides how long the step is: each other
# stage tries the plan with the least memory that takes no longer. Waits for other ranks do not
# count: they get shorter where the stage has more to do. All ranks find the same slowest stage from
# the same times, whenever they read them, and a stage that says nothing leaves all plans as they
# are.


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
