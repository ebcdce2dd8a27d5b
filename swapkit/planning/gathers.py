"""Gathers of sharded weights in a recorded step, also with other modules' weights kept."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swapkit.ir.traces import BEFORE, WAIT, Event, Kind, Operator, Phase, Storage, Trace, is_wait

# ---- gathers -------------------------------------------------------------------------------------
#
# Gathers of sharded weights in a recorded step.
#
# FSDP2 gathers a module's weights before its forward: it copies the shards into a buffer, the ranks
# exchange their parts, and a last operator copies the buffer into the weights. If a module *frees*
# its weights after forward, it gathers them a second time in backward. If it *keeps* them, the
# first gather serves backward, too.

_COPY_IN, _COPY_OUT, _EXCHANGE = "fsdp.all_gather_copy_in.", "fsdp.split_with_sizes_copy.", "c10d."


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One gather of a module's weights. Numbers of operators, and of storages."""

    copy_in: int
    copy_out: int
    wait: int | None  # for the other ranks
    others: tuple[int, ...]  # further operators that only the gather needs
    buffer: int
    weights: tuple[int, ...]
    shards: tuple[int, ...]

    @property
    def operators(self) -> list[int]:
        """All operators but the wait, in order."""
        return sorted({self.copy_in, self.copy_out, *self.others})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredModule:
    """The gathers of one module in a step: pairs of a first one, and the second one if any."""

    path: str
    is_kept: bool
    nbytes: int  # of its gathered weights
    seconds: float  # of the second gathers, or what they would take
    byte_seconds: float  # of memory that keeping takes, or that freeing would spare
    gathers: tuple[tuple[Gather, Gather | None], ...]


def find_gathered(trace: Trace) -> tuple[GatheredModule, ...]:
    """Return the modules whose weights are gathered in a step, in the order of their forwards.

    Left out are those with gathers of another pattern: a module that is called more than once
    before backward, that several backward passes of one forward use, or that needs no gradients.
    """
    by_shards: defaultdict[tuple[int, ...], list[Gather]] = defaultdict(list)
    for gather in list_gathers(trace):
        by_shards[gather.shards].append(gather)
    pace = find_pace(trace, [each for found in by_shards.values() for each in found])
    modules = (_find_module(trace, found, pace) for found in by_shards.values())
    return tuple(each for each in modules if each is not None)


# ---- finding -------------------------------------------------------------------------------------


def list_gathers(trace: Trace) -> Iterator[Gather]:
    """Yield all gathers of a step."""
    for index, operator in enumerate(trace.operators):
        if operator.name.startswith(_COPY_IN) and operator.writes:
            gather = _find_gather(trace, index)
            if gather is not None:
                yield gather


def _find_gather(trace: Trace, copy_in: int) -> Gather | None:
    operators, storages = trace.operators, trace.storages
    buffer = operators[copy_in].writes[0]
    last = range(copy_in + 1, min(storages[buffer].death, len(operators)))
    ours = [each for each in last if buffer in operators[each].reads]
    exchange = _find_named(trace, ours, _EXCHANGE)
    copy_out = _find_named(trace, ours, _COPY_OUT)
    if copy_out is None or exchange is None or exchange > copy_out:
        return None
    between = range(exchange + 1, copy_out)
    casts = list(_find_casts(trace, copy_in))
    birth = storages[buffer].birth
    made = (
        [birth] if birth not in {BEFORE, copy_in} and operators[birth].writes == (buffer,) else []
    )
    return Gather(
        copy_in=copy_in,
        copy_out=copy_out,
        wait=next((each for each in between if is_wait(operators[each].name)), None),
        others=(*made, *casts, exchange),
        buffer=buffer,
        weights=tuple(each for each in operators[copy_out].writes if each != buffer),
        shards=tuple(sorted(_find_shards(trace, [copy_in, *casts]))),
    )


def _find_named(trace: Trace, numbers: Sequence[int], name: str) -> int | None:
    """Return the first of some operators whose name begins like this; None: there is none."""
    found = (each for each in numbers if trace.operators[each].name.startswith(name))
    return next(found, None)


def _find_shards(trace: Trace, numbers: Sequence[int]) -> set[int]:
    """Return the shards that some operators read."""
    read = {storage for each in numbers for storage in trace.operators[each].reads}
    return {each for each in read if _is_shard(trace.storages[each])}


def _find_casts(trace: Trace, copy_in: int) -> Iterator[int]:
    """Yield the operators that only make what the copy into the buffer reads (other precisions)."""
    operators = trace.operators
    made = {
        each
        for each in operators[copy_in].reads
        if trace.storages[each].birth != BEFORE and each not in operators[copy_in].writes
    }
    first = min((trace.storages[each].birth for each in made), default=copy_in)
    for index in range(first, copy_in):
        writes = operators[index].writes
        if writes and made.issuperset(writes):
            yield index


def _is_shard(storage: Storage) -> bool:
    return storage.birth == BEFORE and storage.kind is Kind.STATE


def find_pace(trace: Trace, gathers: Sequence[Gather]) -> float:
    """Return the typical wait for the other ranks, in seconds for each byte of a buffer.

    In backward the exchange may run beside other work, so first gathers count. The median leaves
    out waits for a rank that was late: these would only move to the next collective.
    """
    waits = [
        trace.operators[each.wait].seconds / max(1, trace.storages[each.buffer].nbytes)
        for each in gathers
        if each.wait is not None and _is_forward(trace, each)
    ]
    return statistics.median(waits) if waits else 0.0


def _is_forward(trace: Trace, gather: Gather) -> bool:
    return trace.operators[gather.copy_out].phase is Phase.FORWARD


def _find_module(trace: Trace, gathers: Sequence[Gather], pace: float) -> GatheredModule | None:
    """Return the module with these gathers, in order; None: they have another pattern."""
    pairs = list(_pair(trace, gathers))
    gaps = [find_gap(trace, first, second) for first, second in pairs]
    paths = {trace.operators[first.copy_out].module for first, _ in pairs} - {""}
    kept = {second is None for _, second in pairs}
    if not (len(paths) == len(kept) == 1 and _are_paired(trace, gathers, pairs, gaps)):
        return None
    nbytes = sum(trace.storages[each].nbytes for each in pairs[0][0].weights)
    return GatheredModule(
        path=paths.pop(),
        is_kept=kept.pop(),
        nbytes=nbytes,
        seconds=sum(_time(trace, second or first, pace) for first, second in pairs),
        byte_seconds=nbytes * sum(_sum_seconds(trace, gap) for gap in gaps if gap),
        gathers=tuple(pairs),
    )


def _are_paired(
    trace: Trace,
    gathers: Sequence[Gather],
    pairs: Sequence[tuple[Gather, Gather | None]],
    gaps: Sequence[range | None],
) -> bool:
    """Return whether the pairs have gaps, and all gathers in backward."""
    again = sum(not _is_forward(trace, each) for each in gathers)
    return None not in gaps and again == sum(second is not None for _, second in pairs)


def _sum_seconds(trace: Trace, operators: range) -> float:
    return sum(trace.operators[each].seconds for each in operators)


def _pair(trace: Trace, gathers: Sequence[Gather]) -> Iterator[tuple[Gather, Gather | None]]:
    """Yield first gathers, each with its second one, if any.

    Forwards without a backward, such as evaluations, do not matter: they gather once in any case.
    """
    for gather, after in pairwise([*gathers, None]):
        if gather is None or not _is_forward(trace, gather):
            continue
        if after is not None and not _is_forward(trace, after):
            yield gather, after
        elif find_gap(trace, gather, None) is not None:
            yield gather, None


def find_gap(trace: Trace, first: Gather, second: Gather | None) -> range | None:
    """Return the operators between the uses of weights in forward and in backward.

    None: they have no use in backward, or the two gathers are not of the same weights. Nor are
    they a pair if backward uses the first one's weights, too, and frees them before the second.
    """
    kept = _find_kept_gap(trace, first)
    if second is None:
        return kept
    if kept is not None:
        return None
    storages = trace.storages
    sizes, others = (
        [storages[each].nbytes for each in gather.weights] for gather in (first, second)
    )
    dead = max((storages[each].death for each in first.weights), default=0)
    begins = min((storages[each].birth for each in second.weights), default=0)
    return range(dead, begins) if sizes == others and 0 < dead <= begins else None


def _find_kept_gap(trace: Trace, gather: Gather) -> range | None:
    uses = _find_uses(trace, gather.weights)
    forward, backward = (
        [each for each in uses if trace.operators[each].phase is phase]
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    if not forward or not backward or forward[-1] > backward[0]:
        return None
    return range(forward[-1] + 1, backward[0])


def _find_uses(trace: Trace, weights: Sequence[int]) -> list[int]:
    """Return the operators that use weights, in order."""
    wanted = set(weights)
    end = max((trace.storages[each].death for each in weights), default=0)
    start = max(0, min((trace.storages[each].birth for each in weights), default=0))
    return [
        each for each in range(start, end) if not wanted.isdisjoint(trace.operators[each].reads)
    ]


def _time(trace: Trace, gather: Gather, pace: float) -> float:
    """Return the seconds that a gather takes, without waits for a rank that is late."""
    return sum(trace.operators[each].seconds for each in gather.operators) + own_wait(
        trace, gather, pace
    )


def own_wait(trace: Trace, gather: Gather, pace: float) -> float:
    """Return the seconds of a gather's wait, as far as its bytes explain them: see `find_pace`."""
    waited = 0.0 if gather.wait is None else trace.operators[gather.wait].seconds
    return min(waited, pace * trace.storages[gather.buffer].nbytes)


# ---- gather rewriting ----------------------------------------------------------------------------
#
# A recorded step as it would be if other modules kept their gathered weights.
#
# The rewritten step is a prediction, good enough to choose by (`resharding.py`): a session records
# the step again once it has another setting.


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
