"""What is made of recorded steps."""

from __future__ import annotations

from typing import cast

from swapkit._runtime.control.steps import finish_trace
from swapkit.ir.traces import Operator, Phase, Storage, Trace
from swapkit.planning.selection.cases import Case

TRACE = Trace(
    operators=tuple(
        Operator(name=name, seconds=seconds, phase=Phase.FORWARD, reads=(0,))
        for name, seconds in (("mm", 3.0), ("mm", 1.0), ("add", 1.0))
    ),
    storages=(Storage(nbytes=100, death=3),),
)


def seconds_of(trace: Trace | None) -> list[float]:
    return [each.seconds for each in cast("Trace", trace).operators]


def test_step_when_most_of_its_time_is_doubtful_then_recorded_once_more_and_then_taken() -> None:
    case = Case()
    for _ in range(2):
        assert finish_trace(TRACE, frozenset({0, 1}), case, is_unusual=False) is None
        assert seconds_of(finish_trace(TRACE, frozenset({0, 1}), case, is_unusual=False)) == [
            1.0,
            1.0,
            1.0,
        ]


def test_step_when_doubtful_operators_have_others_of_their_kind_then_taken_at_once() -> None:
    assert seconds_of(finish_trace(TRACE, frozenset({0}), Case(), is_unusual=False)) == [
        1.0,
        1.0,
        1.0,
    ]
