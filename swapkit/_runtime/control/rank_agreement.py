"""What the ranks of a run agree on before any of them follows a plan: one budget for all.

Each rank says once, in the store of the default process group, what its own budget is, and which
is the smallest that has a plan for the step that it recorded. What the others say is looked for as
each recorded step ends; nothing here waits, and nothing is a collective: ranks may be in different
steps, where one that waited for another would wait forever. Which sessions belong together is for
`rank_meetings.py` to tell.
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
PATIENCE_STEPS = 8  # recorded ones, until a rank goes on without those that have said nothing
MOST_NAMED = 8  # ranks, in one message
_SAID = re.compile(rb"([1-9][0-9]{0,18}) (0|[1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rank says of itself."""

    budget_bytes: int
    floor_bytes: int  # the smallest budget that has a plan; 0: not known

    def text(self) -> str:
        """Return what `parse_figures` reads."""
        return f"{self.budget_bytes} {self.floor_bytes}"


def parse_figures(said: bytes, rank: int) -> Figures:
    """Return what a rank says of itself.

    Raises:
        InvalidDocument: it is something else.
    """
    found = _SAID.fullmatch(said)
    amounts = [int(digits) for digits in found.groups()] if found else []
    if not amounts or max(amounts) > MOST_BYTES:
        raise InvalidDocument(
            f"rank {rank} says {show(said)} of its budget: expected two numbers of bytes, the "
            "budget and the least that has a plan; use the same version of swapkit on all ranks"
        )
    return Figures(budget_bytes=amounts[0], floor_bytes=amounts[1])


class Ranks:
    """All ranks, as one session of this one sees them."""

    def __init__(self, places: MeetingPlaces) -> None:
        """Take a place to speak at; nothing is said yet."""
        self._place = places.take(self)
        self._own: Figures | None = None
        self._all: list[Figures] = []  # once all have said it
        self._steps = 0
        self._is_settled = False

    @property
    def has_said(self) -> bool:
        """Whether this rank has said what it has to say, or need not."""
        return self._own is not None or self._is_settled

    def agree(self, budget_bytes: int, find_floor: Callable[[], int]) -> bool:
        """Say what this rank has to say; return whether it may plan, with all others or alone.

        Args:
            budget_bytes: this rank's.
            find_floor: returns the smallest budget that has a plan here; called once.

        Raises:
            InvalidDocument: what another rank says cannot be understood; this one goes on alone.
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
        except (RuntimeError, ValueError) as error:  # such as: there is no process group any more
            self._is_settled = True
            _log.warning("other ranks cannot be asked for their budgets, so none counts: %s", error)
            return True
        self._is_settled = bool(said or silent)
        if said:
            self._all = [parse_figures(each, rank) for rank, each in enumerate(said)]
            self._tell()
        elif silent:
            self._warn(silent)
        return self._is_settled

    def find_budget(self, own_bytes: int) -> int:
        """Return the budget to plan for: the smallest of all ranks, or one's own if alone.

        Raises:
            InfeasibleBudget: some rank has no plan for that.
        """
        if not self._all:
            return own_bytes
        smallest, largest = self._find_smallest(), self._find_largest()
        budget_bytes = self._all[smallest].budget_bytes
        floor_bytes = self._all[largest].floor_bytes
        if floor_bytes > budget_bytes:
            raise InfeasibleBudget(
                f"no plan fits the budget of all {len(self._all)} ranks, "
                f"{format_bytes(budget_bytes)} (rank {smallest}): the smallest that has one on "
                f"rank {largest} is {format_bytes(floor_bytes)} ({floor_bytes} bytes); try that on "
                "all ranks, a smaller batch or shorter sequences",
                least_bytes=floor_bytes,
            )
        return budget_bytes

    def leave(self) -> None:
        """End: what this rank has said counts no more, unless all have heard it. Any thread."""
        self._is_settled = True
        self._place.leave(self)

    def _listen(self, text: str) -> tuple[list[bytes], list[int]]:
        """Return what all ranks say, if all do; or those that do not, once it was asked enough."""
        said, silent = self._place.meet(self, text), []
        if not said and self._steps >= PATIENCE_STEPS:
            silent = self._place.find_silent()
            if not silent:  # the last ones said it just now
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
            "rank %d plans for its own budget: in %d recorded steps nothing came from %s %s%s, "
            "which may have no session that plans",
            self._place.rank,
            self._steps,
            "rank" if len(silent) == 1 else "ranks",
            ", ".join(map(str, silent[:MOST_NAMED])),
            f" and {more} more" if more > 0 else "",
        )


def join_ranks() -> Ranks | None:
    """Return the ranks of a session that begins; None if there are no others.

    It belongs to those that were entered on other ranks while as many were open there.
    """
    places = find_places()
    return None if places is None else Ranks(places)
