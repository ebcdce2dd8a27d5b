"""Failing together: a rank that runs out of memory says so, and no rank waits for it any more.

The ranks of the default process group use its store. A rank writes what happened to it; a thread of
each rank reads that. Both use a connection and a thread of their own, so training never waits
for the store. The thread that reads of a failure first notes it, then has the session's
thread raise it at the next saved tensor or end of a step, then ends the collectives that this rank
waits in (`torch_compat/process_groups.py`): they raise torch's error, which the session replaces as
it leaves.
"""

from __future__ import annotations

import atexit
import re
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from swapkit._native.lib import defer_interruption, forget_interruption
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.control.board import Board, once_per_group, start
from swapkit._runtime.torch_compat.process_groups import end_collectives
from swapkit.errors import InvalidDocument, RankOutOfMemory, SwapkitError
from swapkit.texts import get_logger
from swapkit.units import format_bytes

_log = get_logger("ranks")
ONE, ALL = "rank", "all"  # the values of `on_oom`
MOST_TEXT = 8192  # characters of an error's text that other ranks get
# How often a rank asks the store; all ranks together ask no more often than this in a second.
FASTEST_SECONDS, SLOWEST_SECONDS, MOST_RATE = 0.2, 1.0, 2000
# How long a session that ends with an error waits for the news of its cause, or for its own news to
# arrive: a process that ends at once would take them along.
NEWS_SECONDS = 1.0
# In the texts of torch's backends for a connection that ended or was aborted. Under DETAIL, rank 0
# only says that a rank "failed to pass monitoredBarrier".
_BROKEN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|aborted|nccl|hccl|gloo|monitoredBarrier", re.I
)
# The marks of failures that this process has read: a store may outlive the process group that used
# it. A group's failure has the first number that those of earlier groups have not.
_known: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a rank publishes when it has run out of memory."""

    mark: str  # of no other failure
    rank: int
    budget_bytes: int
    text: str

    def as_error(self, own_rank: int) -> RankOutOfMemory:
        """Return the error to raise on a rank."""
        whose = "this rank" if self.rank == own_rank else f"rank {self.rank}"
        return RankOutOfMemory(
            f"{whose} ran out of memory within its budget of {format_bytes(self.budget_bytes)}, so "
            f"all ranks of the process group stop (on_oom={ALL!r}); this is rank {own_rank}. "
            f"The error there: {self.text}",
            rank=self.rank,
            budget_bytes=self.budget_bytes,
            text=self.text,
        )


class RankAlarm:
    """What the ranks of one process group publish about memory. Any thread."""

    def __init__(self, board: Board) -> None:
        """Take a rank's place; it listens while a thread has joined."""
        self.rank = board.rank
        self.failure: RankOutOfMemory | None = None  # the first one, of any rank
        self._board = board
        self._former = frozenset(_known)  # of earlier process groups
        self._period_seconds = min(SLOWEST_SECONDS, max(FASTEST_SECONDS, board.count / MOST_RATE))
        self._stop = threading.Event()  # of the thread that listens
        self._has_ended = threading.Event()  # whether this rank's collectives were ended
        self._has_published = False
        self._threads: list[int] = []  # those to raise the failure
        self._lock = threading.Lock()

    # ---- for sessions ----------------------------------------------------------------------------

    def join(self, thread: int) -> None:
        """Have a thread raise a failure of another rank."""
        with self._lock:
            self._threads.append(thread)
            self._spread([thread])
            if len(self._threads) == 1 and self.failure is None:
                self._stop = threading.Event()
                atexit.register(self._stop.set)  # runs before the board waits for its threads
                start(self._listen, self._stop, name="swapkit-alarm")

    def leave(self, thread: int) -> None:
        """Undo `join`."""
        with self._lock:
            self._threads.remove(thread)
            if not self._threads:
                self._stop.set()
            if self.failure is not None and thread not in self._threads:
                forget_interruption(self.failure, thread)

    def announce(self, budget_bytes: int, text: str) -> None:
        """Let all ranks know that this one has run out of memory; return at once.

        Only the first failure counts.
        """
        with self._lock:
            if self._has_published or self.failure is not None:
                return
            self._has_published = True
        mark, text = uuid.uuid4().hex, text[:MOST_TEXT]
        failure = Failure(mark=mark, rank=self.rank, budget_bytes=budget_bytes, text=text)
        start(self._publish, failure, name="swapkit-alarm")

    def await_end(self) -> RankOutOfMemory | None:
        """Return the failure of a rank; wait a moment for it, and for the end of collectives.

        None: no failure has come.
        """
        self._has_ended.wait(NEWS_SECONDS)
        return self.failure

    # ---- on threads of its own -------------------------------------------------------------------

    def _publish(self, failure: Failure) -> None:
        try:
            board, number = self._board.connect(), 1
            while board.decide(_topic(number), failure).mark in self._former:
                number += 1
        except (RuntimeError, ValueError) as error:
            _log.warning("cannot tell the other ranks that this one is out of memory: %s", error)

    def _listen(self, stop: threading.Event) -> None:
        try:
            board, number = self._board.connect(), 1
            # Not `store.wait`: if it returns while the interpreter ends, the process aborts.
            while not stop.wait(self._period_seconds):
                failure = board.find(_topic(number), Failure)
                if failure is None:
                    continue
                number += 1
                if failure.mark not in self._former:
                    _known.add(failure.mark)
                    self._fail(failure.as_error(self.rank))
                    return
        except (RuntimeError, ValueError) as error:  # the process group or its store is gone
            log = _log.warning if isinstance(error, InvalidDocument) else _log.debug
            log("rank %d no longer listens to the others: %s", self.rank, error)
        finally:
            atexit.unregister(stop.set)

    def _fail(self, failure: RankOutOfMemory) -> None:
        with self._lock:
            self.failure = failure
            self._spread(self._threads)
        _log.error("%s", failure)
        end_collectives()
        self._has_ended.set()

    def _spread(self, threads: list[int]) -> None:
        """Have threads raise the failure, if it is another rank's. The lock is held."""
        if self.failure is not None and self.failure.rank != self.rank:
            for thread in threads:
                defer_interruption(self.failure, thread)


def _topic(number: int) -> str:
    return f"swapkit/out-of-memory/{number}"


find_alarm = once_per_group(RankAlarm)


class RankWatch:
    """One session's part in failing together. On the session's thread, unless stated otherwise."""

    def __init__(self, installation: Installation[Any], budget_bytes: int) -> None:
        """Join the ranks, if there is a process group.

        Args:
            installation: whose failed requests the other ranks are to know.
            budget_bytes: of the session.
        """
        self._failures = installation.failures
        self._failures.append(self.announce)
        self._budget_bytes = budget_bytes
        self._thread = threading.get_ident()
        self._alarm: RankAlarm | None = None
        self._join(find_alarm())

    def _join(self, alarm: RankAlarm | None) -> None:
        """Leave the former group's alarm, and join this one."""
        former, self._alarm = self._alarm, alarm
        if former is not None:
            former.leave(self._thread)
        if alarm is not None:
            alarm.join(self._thread)

    def announce(self, text: str) -> None:
        """Publish that a request for memory has failed here. Any thread; returns at once."""
        if self._alarm is not None:
            self._alarm.announce(self._budget_bytes, text)

    def end_step(self) -> None:
        """Raise another rank's failure; join a process group that is new.

        Raises:
            RankOutOfMemory: another rank ran out of memory.
        """
        alarm = find_alarm()
        if alarm is not self._alarm:
            self._join(alarm)
        elif alarm is not None and alarm.failure is not None and alarm.failure.rank != alarm.rank:
            raise alarm.failure

    def find_cause(self, error: BaseException) -> RankOutOfMemory | None:
        """Return the failure of a rank that an error comes from; None: it has another cause.

        Waits a moment for the news, if the error looks like one of a connection that ended. After
        an error of memory here, waits until the other ranks know.
        """
        alarm, is_of_memory = self._alarm, isinstance(error, torch.OutOfMemoryError)
        if alarm is None or not isinstance(error, RuntimeError):
            return None
        if is_of_memory or isinstance(error, SwapkitError):
            if alarm.failure is not None or is_of_memory:
                alarm.await_end()
            return None
        is_of_a_group = isinstance(error, torch.distributed.DistError)
        if alarm.failure is None and not is_of_a_group and not _BROKEN.search(str(error)):
            return None
        return alarm.await_end()

    def end(self) -> None:
        """Leave the ranks. Any thread; a second call does nothing."""
        with suppress(ValueError):
            self._failures.remove(self.announce)
        self._join(None)
