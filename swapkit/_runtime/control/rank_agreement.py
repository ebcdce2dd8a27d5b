"""Ranks that do the same agree on one budget, before any of them follows a plan.

Each rank publishes once: its budget, the smallest budget that has a plan for its recorded step, and
the kind of that step. At the end of each recorded step it reads what other ranks have published.
Ranks whose steps are of the same kind (replicas, shards of the same layers) plan for the smallest
of their budgets, so that they take equally long. Others, such as the stages of a pipeline, plan for
themselves: no plan repeats a collective operator, so plans need not agree.

Nothing here waits for a rank or uses a collective: ranks may be in different steps, and a rank that
waited for another could wait forever.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from swapkit._runtime.control.board import Board, once_per_group
from swapkit._runtime.control.rank_switch import RankSwitch, WeightSetting
from swapkit._runtime.model.tracker import find_weakly
from swapkit.errors import InfeasibleBudget
from swapkit.ir.traces import Trace
from swapkit.texts import get_logger
from swapkit.units import format_bytes

if TYPE_CHECKING:
    import torch

# ---- rank likeness -------------------------------------------------------------------------------
#
# What ranks have in common: texts that are equal on ranks that do the same.


def describe_parts(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> str:
    """Return a digest of what a session trains: classes, names and shapes of parameters.

    It is equal on replicas, and on ranks with shards of the same parameters, whatever other
    sessions each rank has.
    """
    return _digest(_list_parts(model, optimizers))


def describe_weakly(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Callable[[], str]:
    """Return a function that does `describe_parts` for those that still exist then."""
    find_model, known = find_weakly(model), [weakref.ref(each) for each in optimizers]

    def describe() -> str:
        return describe_parts(find_model(), [each for find in known if (each := find())])

    return describe


def _list_parts(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[str]:
    if model is not None:
        yield type(model).__qualname__
        for name, parameter in model.named_parameters():
            yield f"{name} {_describe(parameter)}"
    for optimizer in optimizers:
        yield type(optimizer).__qualname__
        for group in optimizer.param_groups:
            yield " ".join(map(_describe, group["params"]))


def _describe(parameter: torch.Tensor) -> str:
    shape = "" if is_lazy(parameter) else str(tuple(parameter.shape))
    return f"{parameter.dtype} {shape}"


def describe_step(trace: Trace) -> str:
    """Return a digest of what autograd saves and uses in a recorded step, in order.

    A plan decides about that. Operators do not count: those of the first steps differ, in which
    optimizers make their states and DDP sorts its buckets.
    """
    storages = trace.storages
    events = (
        f"{event.kind.value} "
        + ("" if event.storage is None else f"{storages[event.storage].nbytes}")
        for event in trace.events
    )
    return _digest(events)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# ---- rounds --------------------------------------------------------------------------------------
#
# They match sessions of several ranks, even if some ranks have other sessions.
#
# Each rank publishes its open sessions: for each its *parts* (a text that says what it trains), its
# place, the round that it is in there, and its figures. Sessions with the same parts share places.
# Those that are open at the same time use different places, in the order in which they first have
# figures. So sessions of other parts, and sessions without figures, do not matter to where a
# session is.
#
# Sessions agree in rounds. A round is over once all ranks are in it, except for those whose
# sessions show that they will not be. It is also over once a session in it ended before that. The
# first rank to write the outcome decides it (the figures of those in it, or none), and it never
# changes. So all ranks pass through the same rounds: a session that only some ranks have uses up
# one round, and the sessions after it agree in the next.

_log = get_logger("ranks")
SESSIONS = "swapkit/sessions"  # the topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rank publishes to those that do the same."""

    budget_bytes: int
    floor_bytes: int  # the smallest budget that has a plan; 0: not known
    step: str  # the kind of its steps

    def __post_init__(self) -> None:
        """Check that there is a budget."""
        if not self.budget_bytes:
            raise ValueError(self)


@dataclass(eq=False)
class OpenSession:
    """An open session, as its rank publishes it."""

    parts: str
    place: str = ""  # none before it first publishes figures
    round: int = 0
    figures: Figures | None = None  # None: it is in no round
    is_settled: bool = False  # it enters no other round

    @property
    def topic(self) -> str:
        """Of the round, on all ranks."""
        return f"{self.place}/{self.round}"

    def may_join(self, other: OpenSession) -> bool:
        """Return whether this session may yet enter the round of another one."""
        if not self.place:
            return self.parts == other.parts
        return self.place == other.place and not self.is_settled


@dataclass(frozen=True, slots=True)
class _RoundEnd:
    """What has ended a round."""

    figures: tuple[Figures | None, ...]  # by rank; nothing: a session has left the round


class Rounds:
    """The rounds of one rank's sessions in one process group. Any thread.

    Without a store, only `agree` raises, as `Board` does.
    """

    def __init__(self, board: Board) -> None:
        """Begin without sessions."""
        self.board = board
        self._next: dict[str, int] = {}  # by place, the round after those this rank was in
        self._lock = threading.RLock()  # held during requests: each ends, or all do
        # Weak references: a session that is dropped never leaves.
        self._sessions: weakref.WeakSet[OpenSession] = weakref.WeakSet()

    def join(self, parts: str) -> OpenSession:
        """Return a session that begins. `parts`: what it trains."""
        session = OpenSession(parts)
        with self._lock:
            self._sessions.add(session)
            self._try_to_publish()
        return session

    def settle(self, session: OpenSession) -> None:
        """Note that a session will enter no other round."""
        with self._lock:
            session.is_settled = True
            self._try_to_publish()

    def leave(self, session: OpenSession) -> None:
        """End a session, and its round with it, unless that is over."""
        with self._lock:
            if session in self._sessions:
                self._sessions.discard(session)
                self.board.release(session.place)
                self._try_to_publish(session)

    def agree(
        self, session: OpenSession, figures: Figures, *, is_last: bool = False
    ) -> tuple[dict[int, Figures], list[int]]:
        """Enter the first round that is not over; return all figures by rank, once it is over.

        If it is not, and `is_last`, return those ranks, too, that may yet enter it.
        """
        with self._lock:
            while session in self._sessions:
                if session.figures is None:
                    self._enter(session, figures)
                outcome = self.board.find(f"{session.topic}/over", _RoundEnd)
                if outcome is None:
                    entered, awaited = self._split(session, needs_all=not is_last)
                    if awaited:
                        return {}, awaited
                    outcome = self.board.decide(f"{session.topic}/over", _RoundEnd(entered))
                ranks = enumerate(outcome.figures[: self.board.count])
                found = {rank: each for rank, each in ranks if each is not None}
                if self.board.rank in found:
                    return found, []
                session.figures = None
            return {}, []

    def _enter(self, session: OpenSession, figures: Figures) -> None:
        board = self.board
        if not session.place:
            session.place = board.reserve(f"swapkit/{session.parts}", session)
            if self._next.get(session.place):  # perhaps of a session that was dropped
                board.decide(f"{session.place}/{self._next[session.place] - 1}/over", _RoundEnd(()))
        session.round = self._next.get(session.place, 0)
        while board.find(f"{session.topic}/over", _RoundEnd) is not None:
            session.round += 1
        self._next[session.place] = session.round + 1
        session.figures = figures
        self._publish()

    def _publish(self) -> None:
        self.board.publish(SESSIONS, list(self._sessions))

    def _try_to_publish(self, ended: OpenSession | None = None) -> None:
        try:
            if ended is not None and ended.figures is not None:
                self.board.decide(f"{ended.topic}/over", _RoundEnd(()))
            self._publish()
        except (RuntimeError, ValueError) as error:  # the group may end before its sessions
            _log.debug("the other ranks do not know which sessions there are: %s", error)

    def _split(
        self, own: OpenSession, *, needs_all: bool
    ) -> tuple[tuple[Figures | None, ...], list[int]]:
        """Return the figures in a session's round, by rank, and the ranks that may yet enter it.

        A rank without a session may yet begin one.
        """
        everyone = range(self.board.count)
        known = self.board.read(SESSIONS, tuple[OpenSession, ...], everyone, needs_all=needs_all)
        entered: dict[int, Figures | None] = {}
        awaited = []
        for rank in everyone:
            sessions = known.get(rank, ())
            found = [each.figures for each in sessions if each.figures and each.topic == own.topic]
            if found:
                entered[rank] = found[0]
            elif not sessions or any(each.may_join(own) for each in sessions):
                awaited.append(rank)
        return tuple(map(entered.get, everyone)), awaited


find_rounds = once_per_group(Rounds)

# ---- agreement -----------------------------------------------------------------------------------

PATIENCE_STEPS = 8  # recorded steps until a rank goes on without the silent ranks
MOST_NAMED = 8  # ranks named in one message


class Ranks:
    """The ranks that do the same, as seen by one session of this rank."""

    def __init__(self, rounds: Rounds, parts: str) -> None:
        """Join the sessions of other ranks with the same parts; nothing is published yet."""
        self.rounds = rounds  # of the process group
        self._session = rounds.join(parts)
        self._own: Figures | None = None
        self._alike: dict[int, Figures] = {}  # by rank; empty: this rank plans for itself
        self._steps = 0

    @property
    def has_published(self) -> bool:
        """Whether this rank has published its figures, or need not."""
        return self._own is not None or self._session.is_settled

    def agree(self, budget_bytes: int, find_floor: Callable[[], int], step: str) -> bool:
        """Publish this rank's figures; return whether it may plan, with other ranks or alone.

        Args:
            budget_bytes: of this rank.
            find_floor: returns the smallest budget that has a plan here; called once.
            step: the kind of this rank's steps (`describe_step`).
        """
        session = self._session
        if session.is_settled:
            return True
        own = self._own = self._own or Figures(
            budget_bytes=budget_bytes, floor_bytes=find_floor(), step=step
        )
        self._steps += 1
        try:
            found, silent = self.rounds.agree(session, own)
            is_last = self._steps >= PATIENCE_STEPS
            if is_last and not found:  # the last ranks may have published just now
                found, silent = self.rounds.agree(session, own, is_last=True)
        except (RuntimeError, ValueError) as error:  # such as a destroyed process group
            session.is_settled = True
            _log.warning(
                "cannot read the budgets of other ranks, so this rank plans for its own budget: %s",
                error,
            )
            return True
        if found or is_last:
            self.rounds.settle(session)
            self._alike = {rank: each for rank, each in found.items() if each.step == own.step}
            self._log_end(silent)
        return session.is_settled

    def find_budget(self, own_bytes: int) -> int:
        """Return the budget to plan for: the smallest of ranks alike, or `own_bytes` if alone.

        Raises:
            InfeasibleBudget: some rank has no plan for that budget.
        """
        if len(self._alike) < 2:
            return own_bytes
        smallest, budget_bytes, largest, floor_bytes = self._find_extremes()
        if floor_bytes > budget_bytes:
            raise InfeasibleBudget(
                f"no plan fits the budget of {self._name_alike()}, "
                f"{format_bytes(budget_bytes)} (rank {smallest}): rank {largest} needs at least "
                f"{format_bytes(floor_bytes)} ({floor_bytes} bytes). Try that budget on all ranks, "
                "a smaller batch or shorter sequences",
                least_bytes=floor_bytes,
            )
        return budget_bytes

    def find_smallest_budget(self, own_bytes: int) -> int:
        """Return the smallest budget of ranks alike, or `own_bytes` if alone."""
        return min((each.budget_bytes for each in self._alike.values()), default=own_bytes)

    def make_switch(
        self, ranks: tuple[int, ...], positions: Sequence[int], settings: tuple[WeightSetting, ...]
    ) -> RankSwitch | None:
        """Return these ranks' part in a change, see there; None: they do not all do the same."""
        if not self._alike.keys() >= set(ranks):
            return None
        topic = f"{self._session.topic}/switch/{ranks[0]}"
        return RankSwitch(self.rounds.board, topic, ranks, positions, settings)

    def forget_floors(self) -> None:
        """Forget how much the ranks' steps need at least: from now on, they are other steps."""
        self._alike = {rank: replace(each, floor_bytes=0) for rank, each in self._alike.items()}

    def leave(self) -> None:
        """Withdraw this rank's figures, unless all ranks have read them. Any thread."""
        self._session.is_settled = True
        self.rounds.leave(self._session)

    def _name_alike(self) -> str:
        count = len(self._alike)
        is_all = count == self.rounds.board.count
        return f"all {count} ranks" if is_all else f"{count} ranks that do the same"

    def _find_extremes(self) -> tuple[int, int, int, int]:
        """Return a rank with the smallest budget and that, one with the largest floor and that."""
        alike = self._alike
        smallest = min(alike, key=lambda rank: alike[rank].budget_bytes)
        largest = max(alike, key=lambda rank: alike[rank].floor_bytes)
        return smallest, alike[smallest].budget_bytes, largest, alike[largest].floor_bytes

    def _log_end(self, silent: list[int]) -> None:
        own = f"rank {self.rounds.board.rank} plans for its own budget"
        if silent:
            more = len(silent) - MOST_NAMED
            _log.warning(
                "%s: after %d recorded steps, no budget has arrived from %s %s%s, which may have "
                "no session that plans",
                *(own, self._steps, "rank" if len(silent) == 1 else "ranks"),
                ", ".join(map(str, silent[:MOST_NAMED])),
                f" and {more} more" if more > 0 else "",
            )
        elif len(self._alike) < 2:
            _log.info("%s: no other rank does the same", own)
        else:
            smallest, budget_bytes, largest, floor_bytes = self._find_extremes()
            _log.info(
                "%s agree: budget %s (rank %d), floor %s (rank %d)",
                *(self._name_alike(), format_bytes(budget_bytes), smallest),
                *(format_bytes(floor_bytes), largest),
            )


def join_ranks(describe: Callable[[], str], former: Ranks | None = None) -> Ranks | None:
    """Return a session's ranks in the default process group; None: there are no other ranks.

    A program may make the group, or another one, when the session has begun: ask again then.

    Args:
        describe: returns what the session trains (`describe_parts`).
        former: the session's ranks so far, which stay if no other group has come.
    """
    rounds = find_rounds()
    if rounds is None or (former is not None and former.rounds is rounds):
        return former
    if former is not None:
        former.leave()
    return Ranks(rounds, describe())
