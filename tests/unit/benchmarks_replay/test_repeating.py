"""A step that repeats: what passes to its next repetition."""

from __future__ import annotations

import pytest

from benchmarks.replay.allocations import allocations_of_intervals
from benchmarks.replay.repeating import repeat_step
from tests.unit.benchmarks_replay.values import make_trace


def test_step_when_nothing_outlives_it_then_nothing_passes_on() -> None:
    step = repeat_step(allocations_of_intervals([(0, 2, 5), (1, 3, 7)]))
    assert (step.handed, step.dropped, step.renewed) == ({}, (), ())


def test_step_when_blocks_outlive_it_then_they_replace_those_that_it_gives() -> None:
    # Before: a weight, a gradient, an input. The step gives the gradient and makes another.
    step = repeat_step(make_trace((9, 4, 6, 4, 2), "+ + + -1 + + -2", present=3))
    assert step.handed == {1: 3}
    assert step.dropped == (4,)
    assert step.renewed == (2,)


@pytest.mark.parametrize("stream_of", [{1: 7}, {0: 7}])
def test_step_when_blocks_are_of_other_streams_then_they_replace_none(
    stream_of: dict[int, int],
) -> None:
    step = repeat_step(make_trace((4, 4), "+ -0 +", present=1, streams=stream_of))
    assert (step.handed, step.dropped) == ({}, (1,))
    assert step.renewed == (0,)
