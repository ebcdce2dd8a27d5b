"""Times of operators, without what disturbed single ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapkit.ir.traces import Operator, Trace


def smooth_times(trace: Trace) -> Trace:
    """Return a trace in which operators of one kind take the same time: the median of theirs.

    Of one kind are those of the same name on as many bytes. A model repeats its layers, while what
    else runs on a machine, and what happens once, such as the first use of memory, disturbs few.
    """
    seconds: defaultdict[object, list[float]] = defaultdict(list)
    kinds = [_kind(trace, operator) for operator in trace.operators]
    for kind, operator in zip(kinds, trace.operators, strict=True):
        seconds[kind].append(operator.seconds)
    medians = {kind: statistics.median(each) for kind, each in seconds.items()}
    operators = tuple(
        replace(operator, seconds=medians[kind])
        for kind, operator in zip(kinds, trace.operators, strict=True)
    )
    return replace(trace, operators=operators)


def _kind(trace: Trace, operator: Operator) -> object:
    def sizes(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(trace.storages[each].nbytes for each in storages)

    return operator.name, operator.phase, sizes(operator.reads), sizes(operator.writes)
