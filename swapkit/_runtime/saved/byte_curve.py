"""Swapping by the plan's byte counts after a step has deviated from its plan."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from swapkit._native.sched import RESIDENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.shim.types import Mover, StorageGroup


class Curve:
    """The bytes that a plan has sent out by each save, for a step that deviated from the plan.

    A newly saved group is sent out if the plan would have sent out more bytes by the end of the
    saves of the group's module.
    """

    def __init__(self, mover: Mover, curve: Sequence[tuple[int, int]], moved_bytes: int) -> None:
        """Begin in the middle of a step.

        Args:
            mover: sends groups out.
            curve: for each save in the plan: the module's tag, and the bytes sent out by then.
            moved_bytes: sent out in this step so far.
        """
        self._mover = mover
        self._curve = curve
        self._moved_bytes = moved_bytes
        self._at = 0  # the step's position on the curve
        self._places: dict[int, list[int]] = {}
        for at, (tag, _) in enumerate(curve):
            self._places.setdefault(tag, []).append(at)

    def saved(self, group: StorageGroup) -> None:
        """Send a newly saved group out if the step is behind the plan's bytes. Lock held."""
        places = self._places.get(group.tag, [])
        following = bisect_left(places, self._at)
        if following < len(places):
            self._at = places[following]
        if self._moved_bytes + group.nbytes > self._goal() or self._mover.host_is_full:
            return
        if group.state == RESIDENT:
            self._mover.send(group)
            self._moved_bytes += group.nbytes

    def _goal(self) -> int:
        """Return the bytes that the plan sends out by the end of the current module's saves."""
        if not self._curve:
            return 0
        at, tag = self._at, self._curve[self._at][0]
        while at + 1 < len(self._curve) and self._curve[at + 1][0] == tag:
            at += 1
        return self._curve[at][1]
