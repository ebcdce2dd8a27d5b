"""Times of operators, without what disturbed single ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from swapkit.ir.traces import Operator, Trace


def smooth_times(trace: Trace, doubtful: Collection[int] = ()) -> Trace:
    """Return a trace in which operators of one kind take the same time: the median of theirs.

    Of one kind are those of the same name on as many bytes. A model repeats its layers, while what
    else runs on a machine, and what happens once, such as the first use of memory, disturbs few.

    Args:
        trace: as it was recorded.
        doubtful: operators that take at most so long: they count where no other of their kind does,
            and then the least of them.
    """
    kinds = [_kind(trace, operator) for operator in trace.operators]
    certain, most = _find_seconds(trace, kinds, doubtful)
    found = {kind: min(each) for kind, each in most.items()}
    found.update((kind, statistics.median(each)) for kind, each in certain.items())
    operators = tuple(
        replace(operator, seconds=found[kind])
        for kind, operator in zip(kinds, trace.operators, strict=True)
    )
    return replace(trace, operators=operators)


def find_doubt(trace: Trace, doubtful: Collection[int]) -> float:
    """Return which share of a step's time operators take of whose kind none is certain."""
    kinds = [_kind(trace, operator) for operator in trace.operators]
    certain, most = _find_seconds(trace, kinds, doubtful)
    doubt = sum(sum(each) for kind, each in most.items() if kind not in certain)
    seconds = sum(operator.seconds for operator in trace.operators)
    return doubt / seconds if seconds else 0.0


def _find_seconds(
    trace: Trace, kinds: Sequence[object], doubtful: Collection[int]
) -> tuple[dict[object, list[float]], dict[object, list[float]]]:
    """Return the times of each kind that are certain, and those that are not."""
    certain: defaultdict[object, list[float]] = defaultdict(list)
    most: defaultdict[object, list[float]] = defaultdict(list)
    for index, (kind, operator) in enumerate(zip(kinds, trace.operators, strict=True)):
        (most if index in doubtful else certain)[kind].append(operator.seconds)
    return certain, most


def _kind(trace: Trace, operator: Operator) -> object:
    def sizes(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(trace.storages[each].nbytes for each in storages)

    return operator.name, operator.phase, sizes(operator.reads), sizes(operator.writes)
