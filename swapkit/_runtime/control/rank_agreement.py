"""Agreement of ranks that do the same on one budget, before any of them follows a plan.

Each rank publishes once, in the store of the default process group: its budget, the smallest budget
that has a plan for its recorded step, and the kind of that step. It looks for what other ranks
published at the end of each recorded step. Ranks whose steps are of the same kind (replicas, shards
of the same layers) plan for the smallest of their budgets, so that they take equally long. Others,
such as the stages of a pipeline, plan for themselves: no plan repeats a collective operator, so
plans need not agree.

Nothing here waits for a rank or uses a collective: ranks may be in different steps, and a rank that
waited for another could wait forever. `rank_meetings.py` decides which sessions belong together,
`rank_likeness.py` what is alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit._runtime.control.rank_meetings import find_places
from swapkit._runtime.control.rank_switch import SwitchPlace
from swapkit.errors import InfeasibleBudget, InvalidDocument
from swapkit.texts import get_logger
from swapkit.units import MOST_BYTES, format_bytes, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.control.rank_meetings import MeetingPlaces

_log = get_logger(__name__)
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
