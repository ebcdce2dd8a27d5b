"""Assignment of the operators of a recorded step to microbatches."""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from typing import TYPE_CHECKING

from swapkit.ir.traces import EventKind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit._runtime.recording.notes import NotedOperator
    from swapkit._runtime.recording.saved_events import SavedEvent


def number_microbatches(
    rows: Sequence[NotedOperator], phases: Sequence[Phase], events: Sequence[SavedEvent]
) -> list[int]:
    """Return the microbatch number of each operator.

    In a pipeline, its schedule says. Elsewhere a microbatch begins with each call of the root
    module. Without such calls, it begins with a forward that saves something after a backward. A
    backward operator belongs to the microbatch that saved the tensor used last.
    """
    if not rows:
        return []
    if any(row.microbatch is not None for row in rows):
        return list(_by_schedule(rows))
    return _by_uses(rows, phases, events)


def _by_uses(
    rows: Sequence[NotedOperator], phases: Sequence[Phase], events: Sequence[SavedEvent]
) -> list[int]:
    """Number by calls or saves, and backward by the saved tensors that it uses."""
    by_calls = rows[-1].root_calls > 0
    numbers = _by_calls(rows, phases) if by_calls else _by_saves(phases, events)
    uses = [each for each in events if each.kind is EventKind.USE and each.save >= 0]
    where = [each.operator for each in uses]
    last = len(rows) - 1
    whose = [numbers[min(events[each.save].operator, last)] for each in uses]
    for start, end in _runs(phases, is_backward=True):
        first, stop = bisect_left(where, start), bisect_left(where, end)
        used = list(zip(where[first:stop], whose[first:stop], strict=True))
        before = numbers[start - 1] if start else 0
        if used:  # operators before the first use belong to the same microbatch
            before = used[0][1]
        numbers[start:end] = _spread(used, start, end, before)
    return numbers


def _by_schedule(rows: Sequence[NotedOperator]) -> Iterator[int]:
    """Yield the schedule's numbers; what runs between two of its jobs belongs to the former."""
    number = 0
    for row in rows:
        if row.microbatch is not None:
            number = row.microbatch
        yield number


def _spread(used: list[tuple[int, int]], start: int, end: int, current: int) -> Iterator[int]:
    """Yield for each operator the microbatch of the last use; `current` before the first use."""
    at = 0
    for index in range(start, end):
        while at < len(used) and used[at][0] <= index:
            current = used[at][1]
            at += 1
        yield current


def _runs(phases: Sequence[Phase], *, is_backward: bool) -> Iterator[tuple[int, int]]:
    """Yield the range of each run of operators that are, or are not, of backward."""
    end = 0
    for is_of_it, run in groupby(phases, lambda phase: phase is Phase.BACKWARD):
        start, end = end, end + len(list(run))
        if is_of_it == is_backward:
            yield start, end


def _by_calls(rows: Sequence[NotedOperator], phases: Sequence[Phase]) -> list[int]:
    """Number by root calls; forward operators between a backward and a root call join that call."""
    numbers = [max(0, row.root_calls - 1) for row in rows]
    for start, end in _runs(phases, is_backward=False):
        before = rows[start - 1].root_calls if start else 0
        if start and rows[end - 1].root_calls > before:
            for index in range(start, end):
                if rows[index].root_calls == before and phases[index] is Phase.FORWARD:
                    numbers[index] = before
    return numbers


def _by_saves(phases: Sequence[Phase], events: Sequence[SavedEvent]) -> list[int]:
    """Number by forward runs that save something."""
    saves = [each.operator for each in events if each.kind is EventKind.SAVE]
    numbers = [0] * len(phases)
    count = 0
    for start, end in _runs(phases, is_backward=False):
        before = count
        # A result is saved after its operator.
        if start and bisect_left(saves, start + 1) < bisect_left(saves, end + 1):
            count += 1
        for index in range(start, end):
            numbers[index] = count if phases[index] is Phase.FORWARD else before
    for index in range(1, len(phases)):
        if phases[index] is Phase.BACKWARD:
            numbers[index] = numbers[index - 1]
    return numbers
