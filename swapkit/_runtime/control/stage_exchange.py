"""What the stages of a pipeline tell each other: the time that each takes for its step.

Each rank of a pipeline publishes the times of its own plan in the store of the default process
group, and looks now and then for what the others have published. No rank waits: requests run on
threads of their own, and their answers are taken at the end of a later step. A store may outlive
the process group and the sessions that wrote to it. So each session has a *mark*, and repeats the
marks that it has read: a rank believes only what was written after its own mark was read.
"""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._runtime.control.rank_groups import OnePerGroup
from swapkit._runtime.control.shared_store import SharedStore, parse_said
from swapkit.errors import InvalidDocument
from swapkit.texts import get_logger
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swapkit._runtime.control.shared_store import Answer
    from swapkit._runtime.torch_compat.internals import Store
    from swapkit.ir.stages import StagePlace

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
