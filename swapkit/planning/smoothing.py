"""Smoothing of operator times, to remove disturbances of single operators."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from swapkit.ir.traces import SEGMENT, Operator, Trace, is_wait


def smooth_times(trace: Trace, doubtful: Collection[int] = ()) -> Trace:
    """Return a trace in which all operators of one kind take the median of their times.

    Operators of one kind have the same name, phase and sizes. A model repeats its layers, while
    other programs, and one-time costs such as the first use of memory, disturb few operators. How
    long an operator waits for other ranks depends on its place in the step: it keeps its time. So
    does a segment of a compiled graph, whose kernels are unknown.

    Args:
        trace: the recorded trace.
        doubtful: operators whose time is only an upper bound. They count if all operators of their
            kind are doubtful; then the kind takes the shortest of their times.
    """
    kinds = _list_kinds(trace)
    certain, most = _find_seconds(trace, kinds, doubtful)
    found = {kind: min(each) for kind, each in most.items()}
    found.update((kind, statistics.median(each)) for kind, each in certain.items())
    operators = tuple(
        replace(operator, seconds=found[kind])
        for kind, operator in zip(kinds, trace.operators, strict=True)
    )
    return replace(trace, operators=operators)


def find_doubt(trace: Trace, doubtful: Collection[int]) -> float:
    """Return the share of the step's time in kinds whose operators are all doubtful."""
    kinds = _list_kinds(trace)
    certain, most = _find_seconds(trace, kinds, doubtful)
    doubt = sum(sum(each) for kind, each in most.items() if kind not in certain)
    seconds = sum(operator.seconds for operator in trace.operators)
    return doubt / seconds if seconds else 0.0


def _find_seconds(
    trace: Trace, kinds: Sequence[object], doubtful: Collection[int]
) -> tuple[dict[object, list[float]], dict[object, list[float]]]:
    """Return the certain times and the doubtful times of each kind."""
    certain: defaultdict[object, list[float]] = defaultdict(list)
    most: defaultdict[object, list[float]] = defaultdict(list)
    for index, (kind, operator) in enumerate(zip(kinds, trace.operators, strict=True)):
        (most if index in doubtful else certain)[kind].append(operator.seconds)
    return certain, most


def _list_kinds(trace: Trace) -> list[object]:
    """Return the kind of each operator; a wait, and a segment, has a kind of its own."""
    return [
        index if is_wait(operator.name) or operator.name == SEGMENT else _kind(trace, operator)
        for index, operator in enumerate(trace.operators)
    ]


def _kind(trace: Trace, operator: Operator) -> object:
    def sizes(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(trace.storages[each].nbytes for each in storages)

    return operator.name, operator.phase, sizes(operator.reads), sizes(operator.writes)
