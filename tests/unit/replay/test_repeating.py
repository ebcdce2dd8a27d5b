"""The step of a trace that repeats: which one, and what passes to its next repetition."""

from __future__ import annotations

import pytest

from swapkit.ir.allocations import (
    Allocation,
    AllocationEvent,
    AllocationEventKind,
    AllocationTrace,
    allocations_of_intervals,
)
from swapkit.replay.repeating import RepeatedStep, find_repeated_step

TAKE, GIVE, STEP = AllocationEventKind.TAKE, AllocationEventKind.GIVE, AllocationEventKind.STEP


def make_trace(
    sizes: tuple[int, ...], events: str, *, present: int = 0, streams: dict[int, int] | None = None
) -> AllocationTrace:
    """Return a trace: "+" takes the next block, "-2" gives block 2, "|" ends a step."""
    blocks = (
        Allocation(nbytes=nbytes, stream=(streams or {}).get(number, 0))
        for number, nbytes in enumerate(sizes)
    )
    taken = iter(range(len(sizes)))

    def read(word: str) -> AllocationEvent:
        if word == "|":
            return AllocationEvent(kind=STEP)
        if word == "+":
            return AllocationEvent(kind=TAKE, block=next(taken))
        return AllocationEvent(kind=GIVE, block=int(word.removeprefix("-")))

    return AllocationTrace(
        blocks=tuple(blocks), events=tuple(read(word) for word in events.split()), present=present
    )


def moves_of(step: RepeatedStep) -> list[int]:
    return [move.event for move in step.moves]


def test_step_when_there_are_no_marks_then_all_of_the_trace() -> None:
    step = find_repeated_step(allocations_of_intervals([(0, 2, 5), (1, 3, 7)]))
    assert moves_of(step) == [0, 1, 2, 3]
    assert (step.present, step.handed, step.dropped, step.renewed) == ((), {}, (), ())


def test_step_when_there_are_several_then_the_one_with_most_in_use() -> None:
    trace = make_trace((9, 5, 3, 20), "+ + -1 | + -2 + -3 | -0", present=1)
    step = find_repeated_step(trace)
    assert moves_of(step) == [4, 5, 6, 7]
    assert [(move.event, move.block) for move in step.present] == [(0, 0)]


def test_step_when_blocks_outlive_it_then_they_replace_those_that_it_gives() -> None:
    # Before: a weight, a gradient, an input. The step gives the gradient and makes another.
    trace = make_trace((9, 4, 6, 4, 2), "+ + + -1 + + -2 |", present=3)
    step = find_repeated_step(trace)
    assert [move.block for move in step.present] == [0, 1, 2]
    assert step.handed == {1: 3}
    assert step.dropped == (4,)
    assert [(move.event, move.block) for move in step.renewed] == [(2, 2)]


@pytest.mark.parametrize("stream_of", [{1: 7}, {0: 7}])
def test_step_when_blocks_are_of_other_streams_then_they_replace_none(
    stream_of: dict[int, int],
) -> None:
    step = find_repeated_step(make_trace((4, 4), "+ -0 + |", present=1, streams=stream_of))
    assert (step.handed, step.dropped) == ({}, (1,))
    assert [move.block for move in step.renewed] == [0]
