"""When a session carries out the moves of a plan: at which calls of autograd's hooks.

An *event* is one call of the hooks, and `Event.operator` says which operators run between two
events. A plan names operators, but moves are carried out at events: a release that has to be done
before an operator is due at the last event before it; a prefetch that may start at an operator is
due at the first event that is not earlier.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from swapkit.ir.traces import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.plans import Decision
    from swapkit.ir.traces import Trace

NEVER = -1


class EventLife(NamedTuple):
    """The events of one storage."""

    # If it continues another storage, the first event after the end of that one counts as a save.
    first_save: int
    last_save: int  # before its first use
    first_use: int  # the number of events if it is never used
    first_event: int


def find_event_lives(trace: Trace) -> dict[int, EventLife]:
    """Return the events of each saved storage."""
    saves: dict[int, list[int]] = {}
    uses: dict[int, int] = {}
    for number, event in enumerate(trace.events):
        if event.storage is None:
            continue
        if event.kind is EventKind.USE:
            uses.setdefault(event.storage, number)
        else:
            saves.setdefault(event.storage, []).append(number)
    lives: dict[int, EventLife] = {}
    operators = [event.operator for event in trace.events]
    for storage in {**saves, **uses}:
        numbers = saves.get(storage, [])
        first_use = uses.get(storage, len(trace.events))
        first_event = min([first_use, *numbers[:1]])
        if trace.storages[storage].continues is not None:
            numbers = [bisect_left(operators, trace.storages[storage].birth), *numbers]
        if numbers:
            last = max((each for each in numbers if each < first_use), default=numbers[0])
            lives[storage] = EventLife(numbers[0], last, first_use, first_event)
    return lives


class EventMoves(NamedTuple):
    """The events at which a storage is released and prefetched; -1: not set."""

    goes: int
    comes: int


def find_moves(operators: Sequence[int], life: EventLife, decision: Decision) -> EventMoves:
    """Return the events at which a swapped storage is released and prefetched."""
    goes = comes = NEVER
    if decision.release is not None:
        goes = max(bisect_right(operators, decision.release) - 1, life.last_save)
    if decision.prefetch is None:
        return EventMoves(goes, comes)
    # A prefetch that is not due before the operator of the first use is left to that use: at the
    # event before, the operators in between still need the memory.
    if life.first_use == len(operators) or decision.prefetch < operators[life.first_use]:
        comes = min(_event_before(operators, decision.prefetch), life.first_use - 1)
    return EventMoves(goes, comes)


def _event_before(operators: Sequence[int], operator: int) -> int:
    """Return the last event right before an operator, or else the first event after it."""
    after = bisect_right(operators, operator)
    is_right_before = after > 0 and operators[after - 1] == operator
    return after - 1 if is_right_before else after
