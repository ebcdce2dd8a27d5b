"""Failing together: a rank that runs out of memory says so, and no rank waits for it any more.

The ranks of the default process group use its store. A rank writes what happened to it; a thread of
each rank looks for that. Both use a connection and a thread of their own, so training never waits
for the store. The thread that reads of a failure first notes it, then has the session's
thread raise it at the next saved tensor or end of a step, then ends the collectives that this rank
waits in (`torch_compat/process_groups.py`): they raise torch's error, which the session replaces as
it leaves.
"""

from __future__ import annotations

import atexit
import json
import re
import threading
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from swapkit._native.lib import defer_interruption, forget_interruption
from swapkit._runtime.control import rank_store
from swapkit._runtime.control.rank_store import OnePerGroup, parse_said
from swapkit._runtime.torch_compat.internals import connect_again
from swapkit._runtime.torch_compat.process_groups import end_collectives
from swapkit.errors import InvalidDocument, RankOutOfMemory, SwapkitError
from swapkit.texts import get_logger
from swapkit.units import MOST_BYTES, format_bytes, show

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeGuard

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.torch_compat.internals import Store

_log = get_logger(__name__)
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


def parse_failure(text: bytes, own_rank: int) -> tuple[str, RankOutOfMemory]:
    """Parse what a rank wrote when it ran out of memory; return its mark, and the error to raise.

    Raises:
        InvalidDocument: the text has another format.
    """
    try:
        said = parse_said(text)
    except InvalidDocument:
        said = None
    fields = said if isinstance(said, dict) else {}
    mark, text_there = fields.get("mark"), fields.get("text")
    rank, budget_bytes = fields.get("rank"), fields.get("budget_bytes")
    if not (
        _is_text(mark) and _is_text(text_there) and _is_count(rank) and _is_count(budget_bytes)
    ):
        raise InvalidDocument(
            f"a rank that ran out of memory wrote {show(text)}, which this version of swapkit "
            "cannot read. Use the same version on all ranks"
        )
    whose = "this rank" if rank == own_rank else f"rank {rank}"
    message = (
        f"{whose} ran out of memory within its budget of {format_bytes(budget_bytes)}, so all "
        f"ranks of the process group stop (on_oom={ALL!r}); this is rank {own_rank}. "
        f"The error there: {text_there}"
    )
    failure = RankOutOfMemory(message, rank=rank, budget_bytes=budget_bytes, text=text_there)
    return mark, failure


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES


class RankAlarm:
    """What the ranks of one process group say about memory. Any thread."""

    def __init__(
        self, find_store: Callable[[], Store], *, rank: int, count: int, known: set[str]
    ) -> None:
        """Take a rank's place; it listens while a thread has joined.

        Args:
            find_store: returns the store that all ranks share; raises ValueError if it is gone.
            rank: this rank.
            count: the number of ranks.
            known: the marks of failures that this process has read: a store may outlive the process
                group that used it.
        """
        self.rank = rank
        self.failure: RankOutOfMemory | None = None  # the first one, of any rank
        self._period_seconds = min(SLOWEST_SECONDS, max(FASTEST_SECONDS, count / MOST_RATE))
        self._find_store = find_store
        self._known = known
        self._stop = threading.Event()  # of the thread that listens
        self._has_ended = threading.Event()  # whether this rank's collectives were ended
        self._has_said = False
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
                _run(self._listen, self._stop)

    def leave(self, thread: int) -> None:
        """Undo `join`."""
        with self._lock:
            self._threads.remove(thread)
            if not self._threads:
                self._stop.set()
            if self.failure is not None and thread not in self._threads:
                forget_interruption(self.failure, thread)

    def announce(self, budget_bytes: int, text: str) -> None:
        """Tell all ranks that this one has run out of memory; return at once.

        Only the first failure counts.
        """
        with self._lock:
            if self._has_said or self.failure is not None:
                return
            self._has_said = True
        said = {
            "mark": uuid.uuid4().hex,
            "rank": self.rank,
            "budget_bytes": budget_bytes,
            "text": text[:MOST_TEXT],
        }
        _run(self._tell, json.dumps(said))

    def await_end(self) -> RankOutOfMemory | None:
        """Return the failure of a rank; wait a moment for it, and for the end of collectives.

        None: no failure has come.
        """
        self._has_ended.wait(NEWS_SECONDS)
        return self.failure

    def stop(self) -> None:
        """Stop listening for good."""
        self._stop.set()

    # ---- on threads of its own -------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        try:
            store = connect_again(self._find_store())
            store.set(_key(store.add(_key("count"), 1)), text)
        except (RuntimeError, ValueError) as error:
            _log.warning("cannot tell the other ranks that this one is out of memory: %s", error)

    def _listen(self, stop: threading.Event) -> None:
        try:
            store = connect_again(self._find_store())
            number = 1
            # Not `store.wait`: if it returns while the interpreter ends, the process aborts.
            while not stop.wait(self._period_seconds):
                if not store.check([_key(number)]):
                    continue
                mark, failure = parse_failure(store.get(_key(number)), self.rank)
                number += 1
                if mark not in self._known:  # else of an earlier process group
                    self._known.add(mark)
                    self._fail(failure)
                    return
        except InvalidDocument as error:
            _log.warning("rank %d no longer listens to the others: %s", self.rank, error)
        except (RuntimeError, ValueError) as error:  # the process group or its store is gone
            _log.debug("rank %d no longer listens to the others: %s", self.rank, error)

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


def _run(target: Callable[..., None], *args: object) -> None:
    rank_store.start(target, *args, name="swapkit-alarm")


@atexit.register  # later than `store_threads`, so it runs first
def _stop_listening() -> None:
    for alarm in _alarms.all():
        alarm.stop()


def _key(name: object) -> str:
    return f"swapkit/out-of-memory/{name}"


_known: set[str] = set()
_alarms = OnePerGroup(partial(RankAlarm, known=_known))


def find_alarm() -> RankAlarm | None:
    """Return the alarm of the default process group; None: there are no other ranks."""
    return _alarms.find()


class RankWatch:
    """One session's part in failing together. On the session's thread, unless stated otherwise."""

    def __init__(self, installation: Installation[Any], budget_bytes: int) -> None:
        """Join the ranks, if there is a process group.

        Args:
            installation: whose failed requests the other ranks hear of.
            budget_bytes: of the session.
        """
        self._failures = installation.failures
        self._failures.append(self.tell)
        self._budget_bytes = budget_bytes
        self._thread = threading.get_ident()
        self._alarm: RankAlarm | None = None
        self._join(find_alarm())

    def _join(self, alarm: RankAlarm | None) -> None:
        self._alarm = alarm
        if alarm is not None:
            alarm.join(self._thread)

    def _leave(self) -> None:
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.leave(self._thread)

    def tell(self, text: str) -> None:
        """Tell all ranks that a request for memory has failed here. Any thread; returns at once."""
        if self._alarm is not None:
            self._alarm.announce(self._budget_bytes, text)

    def end_step(self) -> None:
        """Raise another rank's failure; join a process group that is new.

        Raises:
            RankOutOfMemory: another rank ran out of memory.
        """
        alarm = find_alarm()
        if alarm is not self._alarm:
            self._leave()
            self._join(alarm)
        elif alarm is not None and alarm.failure is not None and alarm.failure.rank != alarm.rank:
            raise alarm.failure

    def find_cause(self, error: BaseException) -> RankOutOfMemory | None:
        """Return the failure of a rank that an error comes from; None: it has another cause.

        Waits a moment for the news, if the error looks like one of a connection that ended. After
        an error of memory here, waits until the other ranks know.
        """
        if self._alarm is None or not isinstance(error, RuntimeError):
            return None
        alarm = self._alarm
        if isinstance(error, torch.OutOfMemoryError | SwapkitError):
            if alarm.failure is not None or isinstance(error, torch.OutOfMemoryError):
                alarm.await_end()
            return None
        is_of_a_group = isinstance(error, torch.distributed.DistError)
        if alarm.failure is None and not is_of_a_group and not _BROKEN.search(str(error)):
            return None
        return alarm.await_end()

    def end(self) -> None:
        """Leave the ranks. Any thread; a second call does nothing."""
        with suppress(ValueError):
            self._failures.remove(self.tell)
        self._leave()
