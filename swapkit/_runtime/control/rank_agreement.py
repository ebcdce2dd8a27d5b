"""Agreement of all ranks on one budget, before any rank follows a plan.

Each rank publishes two numbers once, in the store of the default process group: its budget, and the
smallest budget that has a plan for its recorded step. It looks for the numbers of the other ranks
at the end of each recorded step. Nothing here waits for a rank or uses a collective: ranks may be
in different steps, and a rank that waited for another could wait forever. `rank_meetings.py`
decides which sessions belong together.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._runtime.control.rank_meetings import find_places
from swapkit.errors import InfeasibleBudget, InvalidDocument
from swapkit.units import MOST_BYTES, format_bytes, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.control.rank_meetings import MeetingPlaces

_log = logging.getLogger(__name__)
PATIENCE_STEPS = 8  # recorded steps until a rank goes on without the silent ranks
MOST_NAMED = 8  # ranks named in one message
_SAID = re.compile(rb"([1-9][0-9]{0,18}) (0|[1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers that a rank publishes."""

    budget_bytes: int
    floor_bytes: int  # the smallest budget that has a plan; 0: not known

    def text(self) -> str:
        """Return the text that `parse_figures` reads."""
        return f"{self.budget_bytes} {self.floor_bytes}"


def parse_figures(said: bytes, rank: int) -> Figures:
    """Parse the text that a rank published.

    Raises:
        InvalidDocument: the text has another format.
    """
    found = _SAID.fullmatch(said)
    amounts = [int(digits) for digits in found.groups()] if found else []
    if not amounts or max(amounts) > MOST_BYTES:
        raise InvalidDocument(
            f"rank {rank} published {show(said)}: expected two numbers of bytes, its budget and "
            "the smallest budget that has a plan. Use the same version of swapkit on all ranks"
        )
    return Figures(budget_bytes=amounts[0], floor_bytes=amounts[1])


class Ranks:
    """All ranks, as seen by one session of this rank."""

    def __init__(self, places: MeetingPlaces) -> None:
        """Take a meeting place; nothing is published yet."""
        self._place = places.take(self)
        self._own: Figures | None = None
        self._all: list[Figures] = []  # of all ranks; empty until all have published
        self._steps = 0
        self._is_settled = False

    @property
    def has_said(self) -> bool:
        """Whether this rank has published its numbers, or need not."""
        return self._own is not None or self._is_settled

    def agree(self, budget_bytes: int, find_floor: Callable[[], int]) -> bool:
        """Publish this rank's numbers; return whether it may plan, with all ranks or alone.

        Args:
            budget_bytes: of this rank.
            find_floor: returns the smallest budget that has a plan here; called once.

        Raises:
            InvalidDocument: another rank published invalid text; this rank goes on alone.
        """
        if self._is_settled:
            return True
        is_new = self._own is None
        if self._own is None:
            self._own = Figures(budget_bytes=budget_bytes, floor_bytes=find_floor())
        self._steps += 1
        try:
            if is_new:
                self._place.begin()
            said, silent = self._listen(self._own.text())
        except (RuntimeError, ValueError) as error:  # such as a destroyed process group
            self._is_settled = True
            _log.warning(
                "cannot read the budgets of other ranks, so this rank plans for its own budget: %s",
                error,
            )
            return True
        self._is_settled = bool(said or silent)
        if said:
            self._all = [parse_figures(each, rank) for rank, each in enumerate(said)]
            self._tell()
        elif silent:
            self._warn(silent)
        return self._is_settled

    def find_budget(self, own_bytes: int) -> int:
        """Return the budget to plan for: the smallest of all ranks, or `own_bytes` if alone.

        Raises:
            InfeasibleBudget: some rank has no plan for that budget.
        """
        if not self._all:
            return own_bytes
        smallest, largest = self._find_smallest(), self._find_largest()
        budget_bytes = self._all[smallest].budget_bytes
        floor_bytes = self._all[largest].floor_bytes
        if floor_bytes > budget_bytes:
            raise InfeasibleBudget(
                f"no plan fits the budget of all {len(self._all)} ranks, "
                f"{format_bytes(budget_bytes)} (rank {smallest}): rank {largest} needs at least "
                f"{format_bytes(floor_bytes)} ({floor_bytes} bytes). Try that budget on all ranks, "
                "a smaller batch or shorter sequences",
                least_bytes=floor_bytes,
            )
        return budget_bytes

    def leave(self) -> None:
        """Withdraw this rank's numbers, unless all ranks have read them. Any thread."""
        self._is_settled = True
        self._place.leave(self)

    def _listen(self, text: str) -> tuple[list[bytes], list[int]]:
        """Return the texts of all ranks, or no texts and, after `PATIENCE_STEPS`, silent ranks."""
        said, silent = self._place.meet(self, text), []
        if not said and self._steps >= PATIENCE_STEPS:
            silent = self._place.find_silent()
            if not silent:  # the last ranks published just now
                said = self._place.meet(self, text)
        return said, silent

    def _find_smallest(self) -> int:
        """Return the rank with the smallest budget."""
        return min(range(len(self._all)), key=lambda rank: self._all[rank].budget_bytes)

    def _find_largest(self) -> int:
        """Return the rank with the largest floor."""
        return max(range(len(self._all)), key=lambda rank: self._all[rank].floor_bytes)

    def _tell(self) -> None:
        smallest, largest = self._find_smallest(), self._find_largest()
        _log.info(
            "all %d ranks agree: budget %s (rank %d), floor %s (rank %d)",
            len(self._all),
            format_bytes(self._all[smallest].budget_bytes),
            smallest,
            format_bytes(self._all[largest].floor_bytes),
            largest,
        )

    def _warn(self, silent: list[int]) -> None:
        more = len(silent) - MOST_NAMED
        _log.warning(
            "rank %d plans for its own budget: after %d recorded steps, no budget has arrived from "
            "%s %s%s, which may have no session that plans",
            self._place.rank,
            self._steps,
            "rank" if len(silent) == 1 else "ranks",
            ", ".join(map(str, silent[:MOST_NAMED])),
            f" and {more} more" if more > 0 else "",
        )


def join_ranks() -> Ranks | None:
    """Return the ranks for a session that begins; None: there are no other ranks.

    The session belongs to those sessions of the other ranks that took the same meeting place.
    """
    places = find_places()
    return None if places is None else Ranks(places)
