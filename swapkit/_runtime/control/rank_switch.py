"""Changes that all ranks of a group make alike: at one point, or on one budget."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

from swapkit._runtime.control.rank_meetings import find_places
from swapkit._runtime.control.rank_store import parse_said
from swapkit.errors import InfeasibleBudget, InvalidDocument, SessionError
from swapkit.texts import get_logger
from swapkit.units import MOST_BYTES, format_bytes, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._runtime.control.rank_meetings import MeetingPlaces
    from swapkit._runtime.torch_compat.internals import Store

# ---- rank switch ---------------------------------------------------------------------------------
#
# A change that all ranks of a group make at the same point, though none waits for another.
#
# The point is a *position*: the number of collectives that a rank has begun in the group. All ranks
# begin the same collectives in the same order, so a position means the same on each of them,
# however far one is ahead. A rank looks at it where its steps end.
#
#   proposal   One rank, the first of the group, publishes the change, a position some steps ahead,
#              and the positions at which its last steps ended.
#   consent    Each rank consents before it has reached that position, if its own steps ended at
#              the same positions: else its steps are counted in another way, and nothing changes.
#   outcome    At the end of the first step at that position or later, each rank asks the store for
#              the outcome. The first one to ask decides it: "go" if all have consented. The outcome
#              never changes, so all ranks follow the same one.
#
# A rank that has not heard of the proposal, or is past the position, has not consented, so nothing
# changes anywhere; the proposal is then repeated for a later position. A rank that leaves says so
# in the outcome. Only requests to the store are waited for, as in `rank_meetings.py`. The one case
# without a way on is a rank that has consented and gets no answer about the outcome: it raises an
# error rather than guess, because a wrong guess would let all ranks wait in unlike collectives.

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


# ---- rank agreement ------------------------------------------------------------------------------
#
# Agreement of ranks that do the same on one budget, before any of them follows a plan.
#
# Each rank publishes once, in the store of the default process group: its budget, the smallest
# budget that has a plan for its recorded step, and the kind of that step. It looks for what other
# ranks published at the end of each recorded step. Ranks whose steps are of the same kind
# (replicas, shards of the same layers) plan for the smallest of their budgets, so that they take
# equally long. Others, such as the stages of a pipeline, plan for themselves: no plan repeats a
# collective operator, so plans need not agree.
#
# Nothing here waits for a rank or uses a collective: ranks may be in different steps, and a rank
# that waited for another could wait forever. `rank_meetings.py` decides which ranks are alike, and
# which sessions belong together.

PATIENCE_STEPS = 8  # recorded steps until a rank goes on without the silent ranks
MOST_NAMED = 8  # ranks named in one message
_SAID = re.compile(rb"([1-9][0-9]{0,18}) (0|[1-9][0-9]{0,18}) ([0-9a-f]{1,64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rank publishes."""

    budget_bytes: int
    floor_bytes: int  # the smallest budget that has a plan; 0: not known
    step: str  # the kind of its steps, in hexadecimal digits

    def text(self) -> str:
        """Return the text that `parse_figures` reads."""
        return f"{self.budget_bytes} {self.floor_bytes} {self.step}"


def parse_figures(said: bytes, rank: int) -> Figures:
    """Parse the text that a rank published.

    Raises:
        InvalidDocument: the text has another format.
    """
    found = _SAID.fullmatch(said)
    amounts = [int(digits) for digits in found.groups()[:2]] if found else []
    if found is None or max(amounts) > MOST_BYTES:
        raise InvalidDocument(
            f"rank {rank} published {show(said)}: expected two numbers of bytes, its budget and "
            "the smallest budget that has a plan, and the kind of its steps. Use the same version "
            "of swapkit on all ranks"
        )
    return Figures(budget_bytes=amounts[0], floor_bytes=amounts[1], step=found[3].decode())


class Ranks:
    """The ranks that do the same, as seen by one session of this rank."""

    def __init__(self, places: MeetingPlaces, parts: str) -> None:
        """Join the sessions of other ranks with the same parts; nothing is published yet."""
        self._places = places
        places.join(self, parts)
        self._own: Figures | None = None
        self._alike: dict[int, Figures] = {}  # by rank; empty: this rank plans for itself
        self._steps = 0
        self._is_settled = False

    @property
    def has_said(self) -> bool:
        """Whether this rank has published its numbers, or need not."""
        return self._own is not None or self._is_settled

    def agree(self, budget_bytes: int, find_floor: Callable[[], int], step: str) -> bool:
        """Publish this rank's numbers; return whether it may plan, with other ranks or alone.

        Args:
            budget_bytes: of this rank.
            find_floor: returns the smallest budget that has a plan here; called once.
            step: the kind of this rank's steps (`rank_likeness.describe_step`).

        Raises:
            InvalidDocument: another rank published invalid text; this rank goes on alone.
        """
        if self._is_settled:
            return True
        if self._own is None:
            floor_bytes = find_floor()
            self._own = Figures(budget_bytes=budget_bytes, floor_bytes=floor_bytes, step=step)
        self._steps += 1
        try:
            said, silent = self._listen(self._own.text())
        except (RuntimeError, ValueError) as error:  # such as a destroyed process group
            self._is_settled = True
            _log.warning(
                "cannot read the budgets of other ranks, so this rank plans for its own budget: %s",
                error,
            )
            return True
        self._is_settled = bool(said or silent)
        if self._is_settled:
            self._places.settle(self)
        if said:
            figures = {rank: parse_figures(each, rank) for rank, each in said.items()}
            self._alike = {
                rank: each for rank, each in figures.items() if each.step == self._own.step
            }
            self._tell()
        elif silent:
            self._warn(silent)
        return self._is_settled

    def find_budget(self, own_bytes: int) -> int:
        """Return the budget to plan for: the smallest of ranks alike, or `own_bytes` if alone.

        Raises:
            InfeasibleBudget: some rank has no plan for that budget.
        """
        if len(self._alike) < 2:
            return own_bytes
        smallest, largest = self._find_smallest(), self._find_largest()
        budget_bytes = self._alike[smallest].budget_bytes
        floor_bytes = self._alike[largest].floor_bytes
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

    def find_switch_place(self, ranks: tuple[int, ...]) -> SwitchPlace | None:
        """Return where these ranks agree on a change; None: they do not all do the same."""
        prefix = self._places.name_round(self)
        if not prefix or not self._alike.keys() >= set(ranks):
            return None
        rank = self._places.rank
        return SwitchPlace(
            ask=self._places.ask, prefix=f"{prefix}/switch/{ranks[0]}", rank=rank, ranks=ranks
        )

    def forget_floors(self) -> None:
        """Forget how much the ranks' steps need at least: from now on, they are other steps."""
        self._alike = {rank: replace(each, floor_bytes=0) for rank, each in self._alike.items()}

    def meet_at(self, places: MeetingPlaces) -> bool:
        """Return whether these are the ranks' meeting places: each process group has its own."""
        return self._places is places

    def leave(self) -> None:
        """Withdraw this rank's numbers, unless all ranks have read them. Any thread."""
        self._is_settled = True
        self._places.leave(self)

    def _listen(self, text: str) -> tuple[dict[int, bytes], list[int]]:
        """Return the texts by rank, or no texts and, after `PATIENCE_STEPS`, silent ranks."""
        said, silent = self._places.meet(self, text), list[int]()
        if not said and self._steps >= PATIENCE_STEPS:
            silent = self._places.find_silent(self)
            if not silent:  # the last ranks published just now
                said = self._places.meet(self, text)
        return said, silent

    def _name_alike(self) -> str:
        count = len(self._alike)
        is_all = count == self._places.count
        return f"all {count} ranks" if is_all else f"{count} ranks that do the same"

    def _find_smallest(self) -> int:
        """Return the rank with the smallest budget."""
        return min(self._alike, key=lambda rank: self._alike[rank].budget_bytes)

    def _find_largest(self) -> int:
        """Return the rank with the largest floor."""
        return max(self._alike, key=lambda rank: self._alike[rank].floor_bytes)

    def _tell(self) -> None:
        if len(self._alike) < 2:
            _log.info(
                "rank %d plans for its own budget: no other rank does the same", self._places.rank
            )
            return
        smallest, largest = self._find_smallest(), self._find_largest()
        _log.info(
            "%s agree: budget %s (rank %d), floor %s (rank %d)",
            self._name_alike(),
            format_bytes(self._alike[smallest].budget_bytes),
            smallest,
            format_bytes(self._alike[largest].floor_bytes),
            largest,
        )

    def _warn(self, silent: list[int]) -> None:
        more = len(silent) - MOST_NAMED
        _log.warning(
            "rank %d plans for its own budget: after %d recorded steps, no budget has arrived from "
            "%s %s%s, which may have no session that plans",
            self._places.rank,
            self._steps,
            "rank" if len(silent) == 1 else "ranks",
            ", ".join(map(str, silent[:MOST_NAMED])),
            f" and {more} more" if more > 0 else "",
        )


def join_ranks(describe: Callable[[], str], former: Ranks | None = None) -> Ranks | None:
    """Return a session's ranks in the default process group; None: there are no other ranks.

    A program may make the group, or another one, when the session has begun: ask again then.

    Args:
        describe: returns what the session trains (`rank_likeness.describe_parts`).
        former: the session's ranks so far, which stay if no other group has come.
    """
    places = find_places()
    if places is None or (former is not None and former.meet_at(places)):
        return former
    if former is not None:
        former.leave()
    return Ranks(places, describe())
