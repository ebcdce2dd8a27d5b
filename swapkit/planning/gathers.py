"""Gathers of sharded weights in a recorded step.

FSDP2 gathers a module's weights before its forward: it copies the shards into a buffer, the ranks
exchange their parts, and a last operator copies the buffer into the weights. If a module *frees*
its weights after forward, it gathers them a second time in backward. If it *keeps* them, the first
gather serves backward, too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from swapkit.ir.traces import BEFORE, Kind, Phase, is_wait

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.traces import Storage, Trace

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
