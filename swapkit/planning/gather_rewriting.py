"""A recorded step as it would be if other modules kept their gathered weights.

The rewritten step is a prediction, good enough to choose by (`resharding.py`): a session records
the step again once it has another setting.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit.ir.traces import BEFORE, WAIT, Operator, Phase
from swapkit.planning.gathers import find_gap, find_gathered, find_pace, list_gathers, own_wait

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from swapkit.ir.traces import Event, Storage, Trace
    from swapkit.planning.gathers import Gather, GatheredModule


def rewrite_gathers(trace: Trace, kept: Collection[str]) -> Trace:
    """Return a step as it would be if exactly these modules kept their gathered weights.

    `kept`: paths; modules that `find_gathered` leaves out stay as they are.
    """
    pace = find_pace(trace, list(list_gathers(trace)))
    found = find_gathered(trace)
    pairs = _list_pairs(each for each in found if each.path in kept and not each.is_kept)
    if pairs:
        trace = _KeptStep(trace, pairs, pace).trace()
        found = find_gathered(trace)
    pairs = _list_pairs(each for each in found if each.is_kept and each.path not in kept)
    return _FreedStep(trace, [first for first, _ in pairs], pace).trace() if pairs else trace


def _list_pairs(modules: Iterable[GatheredModule]) -> list[tuple[Gather, Gather | None]]:
    return [pair for each in modules for pair in each.gathers]


# ---- keeping -------------------------------------------------------------------------------------


class _KeptStep:
    """A step without the second gathers of some modules."""

    def __init__(
        self, trace: Trace, pairs: Sequence[tuple[Gather, Gather | None]], pace: float
    ) -> None:
        self._before = trace
        self._same: dict[int, int] = {}  # weights of second gathers, and those of the first ones
        self._shorter: dict[int, float] = {}  # waits that remain: for ranks that are late
        gone: set[int] = set()
        self._made: set[int] = set()  # storages that only the second gathers need
        for first, second in pairs:
            assert second is not None
            self._same.update(zip(second.weights, first.weights, strict=True))
            gone.update(second.operators)
            for each in (second.copy_in, *second.others):
                self._made.update(trace.operators[each].writes)
            if second.wait is not None:
                seconds = trace.operators[second.wait].seconds
                self._shorter[second.wait] = seconds - own_wait(trace, second, pace)
        self._gone = sorted(gone)
        self._is_gone = gone
        self._deaths = {first: trace.storages[last].death for last, first in self._same.items()}
        self._numbers: dict[int, int] = {}  # of the storages that remain

    def trace(self) -> Trace:
        """Return the rewritten step."""
        before = self._before
        storages = [
            self._shift(replace(each, death=self._deaths.get(number, each.death)))
            for number, each in enumerate(before.storages)
        ]
        remaining = [number for number, each in enumerate(storages) if self._stays(number, each)]
        self._numbers = {number: place for place, number in enumerate(remaining)}
        self._numbers.update((last, self._numbers[first]) for last, first in self._same.items())
        kept = [storages[number] for number in remaining]
        operators = (each for each in range(len(before.operators)) if each not in self._is_gone)
        return replace(
            before,
            operators=tuple(map(self._operator, operators)),
            storages=tuple(map(self._continue, kept)),
            events=tuple(self._events(kept)),
        )

    def _stays(self, number: int, storage: Storage) -> bool:
        """Return whether a storage with its new life is part of the step."""
        is_alive = storage.birth < storage.death
        return is_alive and number not in self._same and number not in self._made

    def _continue(self, storage: Storage) -> Storage:
        if storage.continues is None:
            return storage
        return replace(storage, continues=self._numbers.get(storage.continues))

    def _events(self, storages: Sequence[Storage]) -> Iterator[Event]:
        for event in self._before.events:
            number = None if event.storage is None else self._numbers.get(event.storage)
            moment = self._place(event.operator)
            if number is not None:
                moment = min(max(moment, storages[number].birth), storages[number].death)
            yield replace(event, storage=number, operator=moment)

    def _place(self, operator: int) -> int:
        """Return the new number of an operator, or of the next one if it is gone."""
        return operator - bisect_left(self._gone, operator) if operator > 0 else operator

    def _shift(self, storage: Storage) -> Storage:
        return replace(
            storage,
            birth=self._place(storage.birth),
            death=self._place(storage.death),
            held=self._place(storage.held + 1) - 1,
        )

    def _operator(self, number: int) -> Operator:
        operator = self._before.operators[number]
        return replace(
            operator,
            seconds=self._shorter.get(number, operator.seconds),
            reads=self._renumber(operator.reads),
            writes=self._renumber(operator.writes),
        )

    def _renumber(self, numbers: Sequence[int]) -> tuple[int, ...]:
        known = (self._numbers.get(each) for each in numbers)
        return tuple(dict.fromkeys(each for each in known if each is not None))


# ---- freeing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _SecondGather:
    """A second gather that is added."""

    first: Gather
    begins: int  # the operator before which the buffer is filled
    ends: int  # the operator before which the weights are copied out of it
    forward_end: int  # the first operator that runs without the first gather's weights
    buffer: int  # a new storage
    weights: tuple[int, ...]  # new storages


class _FreedStep:
    """A step with a second gather, like the first one, before backward's first use.

    FSDP2 fills the buffer one module ahead, right after the gather before.
    """

    def __init__(self, trace: Trace, firsts: Sequence[Gather], pace: float) -> None:
        self._trace = trace
        self._pace = pace
        self._seconds = list(self._plan(firsts))
        # For each operator that is added, the one that it runs before. The sort keeps the order of
        # those at one place: out of the buffer of one gather, then into the buffer of the next.
        added = [
            (point, each, kind)
            for each in self._seconds
            for point, kind in ((each.begins, "in"), (each.begins, "wait"), (each.ends, "out"))
        ]
        self._added = sorted(added, key=lambda entry: entry[0])
        self._points = [point for point, _, _ in self._added]
        self._places = {
            (each.buffer, kind): point + place
            for place, (point, each, kind) in enumerate(self._added)
        }

    def _plan(self, firsts: Sequence[Gather]) -> Iterator[_SecondGather]:
        number, before = len(self._trace.storages), 0
        gaps = [(find_gap(self._trace, each, None), each) for each in firsts]
        found = [(gap, each) for gap, each in gaps if gap is not None]
        for gap, first in sorted(found, key=lambda pair: pair[0].stop):
            between = self._trace.operators[before : gap.stop]
            is_one_pass = all(each.phase is Phase.BACKWARD for each in between)
            count = len(first.weights)
            yield _SecondGather(
                first=first,
                begins=before if is_one_pass else gap.stop,
                ends=gap.stop,
                forward_end=gap.start,
                buffer=number,
                weights=tuple(range(number + 1, number + 1 + count)),
            )
            number, before = number + 1 + count, gap.stop

    def trace(self) -> Trace:
        """Return the rewritten step."""
        trace = self._trace
        storages = [self._shift(each) for each in trace.storages]
        for each in self._seconds:
            storages += list(self._storages(each, storages))
        events = []
        for event in trace.events:
            moment = self._after(event.operator - 1) + 1 if event.operator else 0
            if event.storage is not None:
                storage = storages[event.storage]
                moment = min(max(moment, storage.birth), storage.death)
            events.append(replace(event, operator=moment))
        return replace(
            trace,
            operators=tuple(self._operators()),
            storages=tuple(storages),
            events=tuple(events),
        )

    def _after(self, operator: int) -> int:
        """Return the new number of an operator."""
        return operator + bisect_right(self._points, operator)

    def _shift(self, storage: Storage) -> Storage:
        return replace(
            storage,
            birth=storage.birth if storage.birth == BEFORE else self._after(storage.birth),
            death=self._after(storage.death - 1) + 1,
            held=storage.held if storage.held == BEFORE else self._after(storage.held),
        )

    def _storages(self, added: _SecondGather, storages: list[Storage]) -> Iterator[Storage]:
        """Yield the buffer and the weights of a second gather; end the first one's weights."""
        begin, end = (self._places[added.buffer, kind] for kind in ("in", "out"))
        buffer = self._trace.storages[added.first.buffer]
        yield replace(buffer, birth=begin, death=end + 1, held=BEFORE)
        dead = self._after(added.forward_end - 1) + 1
        for number in added.first.weights:
            weights = storages[number]
            last = max(weights.death, end + 1)
            yield replace(weights, birth=end, death=last, held=BEFORE)
            storages[number] = replace(weights, death=dead, held=min(weights.held, dead - 1))

    def _operators(self) -> Iterator[Operator]:
        waiting = list(reversed(self._added))
        new: dict[int, int] = {}  # the weights of first gathers, and those that replace them
        for number, operator in enumerate(self._trace.operators):
            while waiting and waiting[-1][0] == number:
                _, added, kind = waiting.pop()
                yield self._make(added, kind)
                if kind == "out":
                    new.update(zip(added.first.weights, added.weights, strict=True))
            yield replace(
                operator,
                reads=tuple(new.get(each, each) for each in operator.reads),
                writes=tuple(new.get(each, each) for each in operator.writes),
            )

    def _make(self, added: _SecondGather, kind: str) -> Operator:
        operators, first = self._trace.operators, added.first
        after = operators[added.ends]
        if kind == "wait":
            seconds = own_wait(self._trace, first, self._pace)
            made = Operator(name=WAIT, seconds=seconds, phase=after.phase)
        elif kind == "in":
            parts = [operators[each] for each in (first.copy_in, *first.others)]
            made = replace(
                operators[first.copy_in],
                seconds=sum(each.seconds for each in parts),
                reads=(*first.shards, added.buffer),
                writes=(added.buffer,),
                workspace_bytes=max(each.workspace_bytes for each in parts),
            )
        else:
            reads = (added.buffer, *added.weights)
            made = replace(operators[first.copy_out], reads=reads, writes=added.weights)
        return replace(made, phase=after.phase, microbatch=after.microbatch, module="")
