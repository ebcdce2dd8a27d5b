"""Storages that are idle more than once, divided into one storage for each idle stretch.

`retain_graph`, a gradient penalty and losses that share a trunk run backward more than once in a
step. Their saved storages are idle between two passes, as between forward and the first pass. A
plan decides about a storage once, so each such stretch becomes a storage of its own. It continues
the previous storage and begins after the last use of that storage in the earlier pass.

A pass through the graph of another pass, as for a gradient penalty, uses some saved storages twice:
first for the nodes of the earlier pass, and much later for the nodes of forward. The time between
these two uses is such a stretch, too.

A weight may leave wherever the step does not use it: between forward and backward, before the
optimizer writes it, and from its last use in one step to its first use in the next. Its first part
continues its last part, of the step before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from swapkit.ir.traces import BEFORE, Event, Kind, Operator, Phase, Storage, Trace

SHORTEST_WITHIN = 8  # operators between two uses in one pass; a shorter gap is not worth a move


def continue_after_passes(trace: Trace) -> Trace:
    """Return the trace with storages divided where they are idle between backward passes.

    The bytes in memory at each operator do not change. The new storages come after all others.
    """
    passes = _find_passes(trace.operators)
    if len(passes) < 2:
        return trace
    divided = _Divided(trace)
    for number, begins in _find_begins(trace, passes).items():
        divided.divide(number, begins)
    return divided.trace()


def divide_weights(trace: Trace, movable: Container[int] | None = None) -> Trace:
    """Return the trace with weights divided that may leave while the step does not use them.

    Args:
        trace: the step.
        movable: the storages of weights that may leave; None: all weights.
    """
    uses = _find_weights(trace, movable)
    latest = -1
    for index, operator in enumerate(trace.operators):
        for number in dict.fromkeys((*operator.reads, *operator.writes)):
            if number in uses:
                uses[number].append((index, number == latest))
                latest = number
    divided = _Divided(trace)
    for number, indexes in uses.items():
        if indexes:
            far = [
                a + 1
                for (a, _), (b, is_next) in pairwise(indexes)
                # A session moves weights when others are used.
                if b - a > SHORTEST_WITHIN and not is_next
            ]
            divided.divide(number, far, is_round=True)
    return divided.trace()


def _find_weights(
    trace: Trace, movable: Container[int] | None
) -> dict[int, list[tuple[int, bool]]]:
    """Return an empty list for each weight of `divide_weights`."""
    return {
        number: []
        for number, each in enumerate(trace.storages)
        if each.kind is Kind.STATE and each.birth == BEFORE and each.continues is None
        if each.death == len(trace.operators)
        if movable is None or number in movable
    }


def _find_passes(operators: Sequence[Operator]) -> list[range]:
    """Return the operators of each backward pass: an unbroken run of backward operators."""
    passes, end = [], 0
    for is_backward, run in groupby(operators, lambda each: each.phase is Phase.BACKWARD):
        start, end = end, end + len(list(run))
        if is_backward:
            passes.append(range(start, end))
    return passes


def _find_begins(trace: Trace, passes: Sequence[range]) -> dict[int, list[int]]:
    """Return, for each storage to divide, the operators before which a new part begins."""
    pass_of = {index: number for number, each in enumerate(passes) for index in each}
    touches, written = _find_touches(trace)
    begins: dict[int, list[int]] = {}
    for number, indexes in touches.items():
        final = written.get(number, BEFORE)
        for last, following in pairwise(indexes):
            # A later write makes a new version, which autograd would have to save again.
            if last not in pass_of or final > last:
                continue
            is_within = pass_of.get(following) == pass_of[last]
            shortest = _shortest(is_within=is_within, is_divided=number in begins)
            if following - last > shortest:
                begins.setdefault(number, []).append(last + 1)
    return begins


def _shortest(*, is_within: bool, is_divided: bool) -> float:
    """Return the distance in operators above which two uses have an idle stretch in between."""
    if not is_within:
        return 1
    return SHORTEST_WITHIN if is_divided else math.inf  # used by one pass only: stays whole


def _find_touches(trace: Trace) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the operators that touch each divisible storage, and the last writer of each."""
    touches: dict[int, list[int]] = {
        number: []
        for number, storage in enumerate(trace.storages)
        if storage.is_saved and storage.birth != BEFORE
    }
    written: dict[int, int] = {}
    for index, operator in enumerate(trace.operators):
        for number in {*operator.reads, *operator.writes} & touches.keys():
            touches[number].append(index)
        written.update(dict.fromkeys(operator.writes, index))
    return touches, written


class _Divided:
    """A trace's storages and the references to them, while storages are divided."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.storages: list[Storage] = list(trace.storages)
        self._parts: dict[int, list[int]] = {}  # by storage: the numbers of its parts in order
        self._begins: dict[int, list[int]] = {}  # by storage: first operators, without part 0

    def divide(self, number: int, begins: list[int], *, is_round: bool = False) -> None:
        """Divide a storage before each operator in `begins`.

        `is_round`: the first part continues the last one, of the step before.
        """
        whole = self.storages[number]
        parts = [number]
        ends = [*begins, whole.death]
        self.storages[number] = _cut(whole, whole.birth, ends[0])
        for begin, end in zip(begins, ends[1:], strict=True):
            self.storages.append(replace(_cut(whole, begin, end), continues=parts[-1]))
            parts.append(len(self.storages) - 1)
        if is_round:
            self.storages[number] = replace(self.storages[number], continues=parts[-1])
        self._parts[number], self._begins[number] = parts, begins

    def trace(self) -> Trace:
        """Return the trace with the parts."""
        return replace(
            self._trace,
            operators=tuple(self.operators()),
            storages=tuple(self.storages),
            events=tuple(self.events()),
        )

    def operators(self) -> Iterator[Operator]:
        """Yield the operators, with the parts that they read and write."""
        for index, operator in enumerate(self._trace.operators):
            reads = tuple(self._part_at(number, index) for number in operator.reads)
            writes = tuple(self._part_at(number, index) for number in operator.writes)
            is_same = (reads, writes) == (operator.reads, operator.writes)
            yield operator if is_same else replace(operator, reads=reads, writes=writes)

    def events(self) -> Iterator[Event]:
        """Yield the events, with the parts that exist at that time."""
        for event in self._trace.events:
            if event.storage in self._parts:
                yield replace(event, storage=self._part_at(event.storage, event.operator))
            else:
                yield event

    def _part_at(self, number: int, operator: int) -> int:
        parts = self._parts.get(number)
        return number if parts is None else parts[bisect_right(self._begins[number], operator)]


def _cut(whole: Storage, birth: int, death: int) -> Storage:
    """Return the part of a storage from operator `birth` until before operator `death`."""
    held = min(whole.held, death - 1)
    return replace(whole, birth=birth, death=death, held=held if held >= birth else BEFORE)
