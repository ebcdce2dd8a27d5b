"""A change that all ranks of a group make at the same point, though none waits for another.

The point is a *position*: the number of collectives that a rank has begun in the group. All ranks
begin the same collectives in the same order, so a position means the same on each of them, however
far one is ahead. A rank compares it where its steps end.

  proposal   One rank, the first of the group, publishes the change, a position some steps ahead,
             and the positions at which its last steps ended.
  consent    Each rank consents before it has reached that position, if its own steps ended at
             the same positions: else its steps are counted in another way, and nothing changes.
  outcome    At the end of the first step at that position or later, each rank asks the store for
             the outcome. The first one to ask decides it: "go" if all have consented. The outcome
             never changes, so all ranks follow the same one.

A rank that has not read the proposal, or is past the position, has not consented, so nothing
changes anywhere; the proposal is then repeated for a later position. A rank that leaves says so in
the outcome. Only requests to the store are waited for. The one case without a way on is a rank that
has consented and gets no answer about the outcome: it raises an error rather than guess, because a
wrong guess would let all ranks wait in unlike collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swapkit._runtime.control.board import Board
from swapkit.errors import SessionError
from swapkit.texts import get_logger

_log = get_logger("ranks")
LEADS = (4, 8, 16)  # steps between a proposal and its position, in each attempt
COMPARED = 3  # ends of steps that ranks compare
GO, NO, NEVER = "go", "no", "never"  # after `NO` there is another attempt


@dataclass(frozen=True, slots=True)
class WeightSetting:
    """How a user has set a module."""

    path: str
    frees: bool  # its gathered weights, after forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the first rank publishes."""

    kept: tuple[str, ...] | None  # modules that keep their gathered weights; None: no change
    reason: str  # for people
    settings: tuple[WeightSetting, ...] = ()  # of all modules: they must be the same on all ranks
    at: int = 0  # the position
    positions: tuple[int, ...] = ()  # where the rank's last steps ended

    def __post_init__(self) -> None:
        """Check that there are positions to compare."""
        if self.at and not self.positions:
            raise ValueError(self)


@dataclass(frozen=True, slots=True)
class _Decision:
    word: str
    why: str  # there is no change
    at: int = 0  # the position


class RankSwitch:
    """One rank's part in one change. Any thread."""

    def __init__(
        self,
        board: Board,
        topic: str,
        ranks: tuple[int, ...],
        positions: Sequence[int],
        settings: tuple[WeightSetting, ...],
    ) -> None:
        """Wait for a proposal, or make it (`propose`).

        Args:
            board: of all ranks.
            topic: the same on the ranks of the group, and used by no others.
            ranks: of the group.
            positions: where this rank's steps ended; the caller adds to it.
            settings: of this rank's modules.
        """
        self._board = board
        self._topic = topic
        self._ranks = ranks
        self._positions = positions
        self._settings = settings
        self._wanted: Proposal | None = None  # of the first rank
        self._consented: Proposal | None = None  # set first, then published: it may arrive late
        self._attempt = 0
        self._lock = threading.RLock()  # the session may end on another thread
        self.is_over = False
        self.why = ""  # why there is no change

    @property
    def proposes(self) -> bool:
        """Whether this rank makes the proposal."""
        return self._board.rank == min(self._ranks)

    def propose(self, kept: tuple[str, ...] | None, reason: str) -> None:
        """Propose which modules keep their weights, at the end of a step; None: no change."""
        self._wanted = Proposal(kept=kept, reason=reason, settings=self._settings)

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
                outcome = self._go_on(position)
            except (RuntimeError, ValueError) as error:
                self._end(f"the ranks' store cannot be asked: {error}", error)
                return None
            return None if outcome is None else self._follow(outcome, position)

    def leave(self) -> None:
        """Withdraw. Any thread; a second call does nothing.

        Raises:
            SessionError: the other ranks have made the change that this rank has consented to.
        """
        with self._lock:
            if self.is_over:
                return
            why, outcome = f"the session of rank {self._board.rank} has ended", None
            try:
                if self._consented is not None:
                    outcome = self._close(NEVER, why)
                elif self.proposes:  # so that the others stop asking
                    self._board.decide(self._key("proposal"), Proposal(kept=None, reason=why))
            except ValueError as error:  # the group may end before its sessions
                _log.debug("the other ranks do not know that this one leaves: %s", error)
            except RuntimeError as error:
                self._end(why, error)
            self._end(why)
            if outcome is not None and outcome.word == GO:
                raise SessionError(
                    "this rank's session has ended before a step at which the other ranks have "
                    "changed `reshard_after_forward`. End it at the same step on all ranks"
                )

    def _end(self, why: str, error: Exception | None = None) -> None:
        """End, without an answer if there is an error."""
        self.is_over, self.why = True, why
        if error is not None and self._consented is not None:  # the others may count on this rank
            raise SessionError(
                "this rank cannot ask whether all ranks change `reshard_after_forward`, as they "
                f"have agreed to, so it stops: {error}"
            ) from error

    def _follow(self, outcome: _Decision, position: int) -> Proposal | None:
        consented = self._consented
        if outcome.word == GO:
            self._end("")
            if consented is None or outcome.at != position:
                raise SessionError(
                    "the ranks' steps no longer end at the same collectives, so that they cannot "
                    f"change `reshard_after_forward` together: {outcome.at} elsewhere, {position} "
                    f"on rank {self._board.rank}. Count steps alike on all ranks"
                )
            return consented
        self._attempt += 1
        self._consented = None
        if outcome.word == NEVER or self._attempt == len(LEADS):
            self._end(outcome.why)
        return None

    def _key(self, name: str) -> str:
        return f"{self._topic}/{self._attempt}/{name}"

    def _close(self, word: str, why: str, at: int = 0) -> _Decision:
        """Decide the outcome unless there is one; return the one that holds."""
        return self._board.decide(self._key("outcome"), _Decision(word, why, at))

    def _go_on(self, position: int) -> _Decision | None:
        """Return the outcome of the attempt; None: there is none yet."""
        if self._consented is not None:
            known = self._board.read(self._key("consent"), bool, self._ranks, needs_all=False)
            silent = [each for each in self._ranks if each not in known]
            if silent:
                return self._close(NO, f"rank {silent[0]} had not heard of a change in time")
            return self._close(GO, "", position)
        if self.proposes:
            self._publish(position)
            return None
        proposal = self._board.find(self._key("proposal"), Proposal)
        if proposal is None:
            return None
        if proposal.kept is not None:
            return self._judge(proposal, position)
        self._end(proposal.reason)
        return None

    def _consent(self, proposal: Proposal) -> None:
        self._consented = proposal
        self._board.publish(self._key("consent"), note=True)

    def _publish(self, position: int) -> None:
        proposal, positions = self._wanted, tuple(self._positions)[-COMPARED:]
        if proposal is None or (proposal.kept is not None and len(positions) < COMPARED):
            return
        if proposal.kept is None:
            self._end(proposal.reason)
        else:
            step = max(after - before for before, after in pairwise(positions))
            at = position + LEADS[self._attempt] * max(1, step)
            proposal = replace(proposal, at=at, positions=positions)
            self._consent(proposal)
        self._board.decide(self._key("proposal"), proposal)

    def _judge(self, proposal: Proposal, position: int) -> _Decision | None:
        """Consent, or end the attempt; do neither while this rank has not come as far."""
        rank = f"rank {self._board.rank}"
        if position >= proposal.at:
            return self._close(NO, f"{rank} heard too late of a change")
        begin, end = proposal.positions[0], proposal.positions[-1]
        if position < end:
            return None
        own = tuple(each for each in self._positions if begin <= each <= end)
        if own != proposal.positions or len(set(own)) < len(own):
            where = f"the steps of {rank} do not end at the same collectives"
            return self._close(NEVER, f"{where} as those of the other ranks")
        if proposal.settings != self._settings:
            return self._close(NEVER, "the modules of the ranks have other settings")
        self._consent(proposal)
        return None
