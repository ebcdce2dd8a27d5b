"""A change that all ranks of a group make at the same point, though none waits for another.

The point is a *position*: the number of collectives that a rank has begun in the group. All ranks
begin the same collectives in the same order, so a position means the same on each of them, however
far one is ahead. A rank looks at it where its steps end.

    proposal   One rank, the first of the group, publishes the change, a position some steps ahead,
               and the positions at which its last steps ended.
    consent    Each rank consents before it has reached that position, if its own steps ended at
               the same positions: else its steps are counted in another way, and nothing changes.
    outcome    At the end of the first step at that position or later, each rank asks the store for
               the outcome. The first one to ask decides it: "go" if all have consented. The outcome
               never changes, so all ranks follow the same one.

A rank that has not heard of the proposal, or is past the position, has not consented, so nothing
changes anywhere; the proposal is then repeated for a later position. A rank that leaves says so in
the outcome. Only requests to the store are waited for, as in `rank_meetings.py`. The one case
without a way on is a rank that has consented and gets no answer about the outcome: it raises an
error rather than guess, because a wrong guess would let all ranks wait in unlike collectives.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

from swapkit._runtime.control.shared_store import parse_said
from swapkit.errors import InvalidDocument, SessionError
from swapkit.texts import get_logger
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._runtime.torch_compat.internals import Store

_log = get_logger(__name__)
LEADS = (4, 8, 16)  # steps between a proposal and its position, in each attempt
LOOKS = 3  # ends of steps that ranks compare
GO, NO, NEVER = "go", "no", "never"  # how an outcome begins; after `NO` there is another attempt
_T = TypeVar("_T")


class _Ask(Protocol):
    def __call__(self, ask: Callable[[Store], _T], /) -> _T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the first rank publishes. Without a `change`, there will be none."""

    change: str
    reason: str  # for people
    at: int = 0  # the position
    positions: tuple[int, ...] = ()  # where the rank's last steps ended

    def text(self) -> str:
        """Return the text that `parse_proposal` reads."""
        return json.dumps(asdict(self))


def parse_proposal(said: bytes) -> Proposal:
    """Parse what the first rank published.

    Raises:
        InvalidDocument: the text has another format.
    """
    try:
        found = parse_said(said)
    except InvalidDocument:
        found = None
    match found:
        case {"change": str(change), "reason": str(reason), "at": int(at), "positions": [*places]}:
            if all(type(each) is int for each in places) and (places or not change):
                return Proposal(change=change, reason=reason, at=at, positions=tuple(places))
    raise InvalidDocument(
        f"a rank proposed {show(said)}, which this version of swapkit cannot read. Use the "
        "same version on all ranks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlace:
    """Where ranks find each other. `prefix`: of their keys in the store, used by no others."""

    ask: _Ask
    prefix: str
    rank: int
    ranks: tuple[int, ...]


class RankSwitch:
    """One rank's part in one change. Any thread."""

    def __init__(
        self, place: SwitchPlace, positions: Sequence[int], check: Callable[[str], str]
    ) -> None:
        """Wait for a proposal, or make it (`propose`).

        Args:
            place: where the ranks find each other.
            positions: where this rank's steps ended; the caller adds to it.
            check: returns why this rank cannot make a change; empty: it can.
        """
        self._place = place
        self._positions = positions
        self._check = check
        self._wanted: Proposal | None = None  # of the first rank
        self._consented: Proposal | None = None
        self._attempt = 0
        self._lock = threading.RLock()  # the session may end on another thread
        # A request that got no answer in time goes on, on its thread, without the lock above.
        self._gate = threading.Lock()
        self._is_bound = False  # whether this rank's consent may be in the store
        self.is_over = False
        self.why = ""  # why there is no change

    @property
    def proposes(self) -> bool:
        """Whether this rank makes the proposal."""
        return self._place.rank == min(self._place.ranks)

    def propose(self, change: str, reason: str) -> None:
        """Propose a change at the end of the next step; without `change`: that there is none."""
        self._wanted = Proposal(change=change, reason=reason)

    def end_step(self) -> Proposal | None:
        """Go on, where a step has ended; return what all ranks change now.

        Raises:
            SessionError: other ranks may have changed at another point, or this rank cannot know.
        """
        with self._lock:
            position, consented = self._positions[-1], self._consented
            if self.is_over or (consented is not None and position < consented.at):
                return None
            try:
                outcome = self._place.ask(partial(self._go_on, position))
            except (RuntimeError, ValueError) as error:
                if self._give_up(f"the ranks' store cannot be asked: {error}"):
                    raise _cannot_ask(error) from error
                return None
            return self._follow(outcome, position)

    def leave(self) -> None:
        """Withdraw. Any thread; a second call does nothing.

        Raises:
            SessionError: the other ranks have made the change that this rank has consented to.
        """
        with self._lock:
            if self.is_over:
                return
            why = f"the session of rank {self._place.rank} has ended"
            try:
                outcome = self._place.ask(partial(self._withdraw, why))
            except ValueError as error:  # the group may end before its sessions
                self._end(why)
                _log.debug("cannot tell the other ranks that this one leaves: %s", error)
                return
            except RuntimeError as error:
                if self._give_up(why):
                    raise _cannot_ask(error) from error
                return
            self._end(why)
            if outcome.startswith(GO):
                raise SessionError(
                    "this rank's session has ended before a step at which the other ranks have "
                    "changed `reshard_after_forward`. End it at the same step on all ranks"
                )

    def _end(self, why: str) -> None:
        self.is_over, self.why = True, why

    def _give_up(self, why: str) -> bool:
        """End without an answer; return whether the other ranks may count on this one."""
        with self._gate:
            self._end(why)
            return self._is_bound

    def _follow(self, outcome: str, position: int) -> Proposal | None:
        word, _, rest = outcome.partition(" ")
        consented = self._consented
        if word == GO:
            self._end("")
            if consented is None or rest != str(position):
                raise SessionError(
                    "the ranks' steps no longer end at the same collectives, so that they cannot "
                    f"change `reshard_after_forward` together: {rest} elsewhere, {position} on "
                    f"rank {self._place.rank}. Count steps alike on all ranks"
                )
            return consented
        if word in {NO, NEVER}:
            self._attempt += 1
            self._consented, self._is_bound = None, False
            if word == NEVER or self._attempt == len(LEADS):
                self._end(rest)
        return None

    # ---- requests to the store -------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._place.prefix}/{self._attempt}/{name}"

    def _go_on(self, position: int, store: Store) -> str:
        """Return the outcome of the attempt; empty: there is none yet."""
        if self._consented is not None:
            return self._decide(position, store)
        if self.proposes:
            self._publish(position, store)
            return ""
        if not store.check([self._key("proposal")]):
            return ""
        proposal = parse_proposal(store.get(self._key("proposal")))
        if not proposal.change:
            self._end(proposal.reason)
            return ""
        refusal = self._judge(proposal, position)
        if refusal:
            return self._close(store, refusal)
        if refusal is not None:
            self._consent(proposal, store)
        return ""

    def _consent(self, proposal: Proposal, store: Store) -> None:
        with self._gate:
            if self.is_over:
                raise RuntimeError("this rank has given up waiting for the store")
            self._is_bound = True
        store.set(self._key(f"rank-{self._place.rank}"), "yes")
        self._consented = proposal

    def _publish(self, position: int, store: Store) -> None:
        wanted, positions = self._wanted, tuple(self._positions)[-LOOKS:]
        if wanted is None or (wanted.change and len(positions) < LOOKS):
            return
        proposal = wanted
        if wanted.change:
            step = max(after - before for before, after in pairwise(positions))
            at = position + LEADS[self._attempt] * max(1, step)
            proposal = Proposal(
                change=wanted.change, reason=wanted.reason, at=at, positions=positions
            )
            self._consent(proposal, store)
        else:
            self._end(wanted.reason)
        store.set(self._key("proposal"), proposal.text())

    def _judge(self, proposal: Proposal, position: int) -> str | None:
        """Return why this rank does not consent; empty: it does; None: not known yet."""
        begin, end = proposal.positions[0], proposal.positions[-1]
        if position >= proposal.at:
            return f"{NO} rank {self._place.rank} heard too late of a change"
        if position < end:
            return None
        mine = tuple(each for each in self._positions if begin <= each <= end)
        if mine != proposal.positions or len(set(mine)) < len(mine):
            return (
                f"{NEVER} the steps of rank {self._place.rank} do not end at the same collectives "
                "as those of the other ranks"
            )
        refusal = self._check(proposal.change)
        return f"{NEVER} {refusal}" if refusal else ""

    def _decide(self, position: int, store: Store) -> str:
        ranks = self._place.ranks
        silent = [each for each in ranks if not store.check([self._key(f"rank-{each}")])]
        if silent:
            return self._close(store, f"{NO} rank {silent[0]} had not heard of a change in time")
        return self._close(store, f"{GO} {position}")

    def _close(self, store: Store, outcome: str) -> str:
        """Write an outcome unless there is one; return the one that holds."""
        return store.compare_set(self._key("outcome"), "", outcome).decode()

    def _withdraw(self, why: str, store: Store) -> str:
        if self._consented is not None:
            return self._close(store, f"{NEVER} {why}")
        if self.proposes:  # so that the others stop asking
            store.set(self._key("proposal"), Proposal(change="", reason=why).text())
        return ""


def _cannot_ask(error: Exception) -> SessionError:
    return SessionError(
        "this rank cannot ask whether all ranks change `reshard_after_forward`, as they have "
        f"agreed to, so it stops: {error}"
    )
