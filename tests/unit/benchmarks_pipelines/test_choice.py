"""The joint choice: the least time first, then the least memory."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

import pytest

from benchmarks.pipelines.choice import choose_ways
from benchmarks.pipelines.orders import JobTiming
from benchmarks.pipelines.timetables import Pipeline, ScheduleName, order_pipeline
from benchmarks.pipelines.torch_orders import read_actions
from benchmarks.pipelines.ways import Cost, StageWays, Way
from swapkit.ir.traces import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pipelines.orders import JobOrder

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe")


def stage_of(order: JobOrder, stage: int, ways: Sequence[tuple[int, float, float]]) -> StageWays:
    """Ways with these bytes, and these seconds of a forward and of a backward."""
    return StageWays(
        ways=tuple(
            Way(peak_bytes=nbytes, costs=(Cost(forward), Cost(backward)))
            for nbytes, forward, backward in ways
        ),
        kinds=[int(job.phase is Phase.BACKWARD) for job in order.jobs[stage]],
    )


def step_of(timing: JobTiming, stages: Sequence[StageWays], ways: Sequence[int]) -> float:
    """The time of a step, without the search."""
    costs = [
        own.ways[way].costs[kind]
        for own, way in zip(stages, ways, strict=True)
        for kind in own.kinds
    ]
    ends = timing.run([each.seconds for each in costs], [each.early_seconds for each in costs])
    return max(ends) + max(
        own.ways[way].tail_seconds for own, way in zip(stages, ways, strict=True)
    )


def draw_stages(order: JobOrder, draw: random.Random, count: int = 3) -> list[StageWays]:
    """Less memory never takes less time in total, but perhaps in one kind of job."""
    stages = []
    for stage in range(len(order.jobs)):
        ways = []
        for number in range(count):
            more = number * draw.uniform(0.0, 0.6)
            shift = draw.uniform(0.0, 0.3)
            ways.append((100 - 20 * number, 1.0 + shift, 2.0 - shift + more))
        stages.append(stage_of(order, stage, ways))
    return stages


def test_choice_when_one_stage_is_slow_then_the_others_spend_their_time_on_memory() -> None:
    # By hand: stage 1 takes 2 + 4 s for each of 4 microbatches, and stage 0 half of that.
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=4))
    fast = stage_of(order, 0, [(100, 1.0, 2.0), (60, 1.0, 3.0), (30, 1.0, 9.0)])
    slow = stage_of(order, 1, [(100, 2.0, 4.0), (50, 2.0, 5.0)])
    choice = choose_ways(JobTiming(order), [fast, slow], [100, 100], tolerance=0.04)
    assert choice is not None
    assert choice.separate == (0, 0)
    assert choice.separate_seconds == 1.0 + 4 * 6.0 + 2.0
    assert choice.ways == (1, 0)  # only the last backward of stage 0 is waited for: 1 s in 27
    assert choice.seconds == 28.0
    strict = choose_ways(JobTiming(order), [fast, slow], [100, 100])
    assert strict is not None
    assert strict.ways == (0, 0)
    assert strict.seconds == 27.0


def test_choice_when_recomputing_fits_the_bubble_then_it_costs_nothing() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=1))
    kinds = [0, 1]
    late = Way(peak_bytes=50, costs=(Cost(1.0), Cost(3.0)))
    early = Way(peak_bytes=40, costs=(Cost(1.0), Cost(3.0, early_seconds=1.0)))
    first = StageWays(
        ways=(Way(peak_bytes=90, costs=(Cost(1.0), Cost(2.0))), late, early), kinds=kinds
    )
    second = stage_of(order, 1, [(90, 1.0, 2.0)])
    choice = choose_ways(JobTiming(order), [first, second], [90, 90])
    assert choice is not None
    assert choice.ways == (2, 0)
    assert choice.seconds == choice.separate_seconds == 6.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_choice_when_compared_with_all_choices_then_the_least_time_and_no_stage_can_shrink(
    schedule: ScheduleName, seed: int
) -> None:
    draw = random.Random(seed)
    order = order_pipeline(Pipeline(schedule=schedule, stages=3, microbatches=3))
    timing, stages = JobTiming(order), draw_stages(order, draw)
    budgets = [draw.choice((60, 80, 100)) for _ in stages]
    choice = choose_ways(timing, stages, budgets)
    assert choice is not None
    every = [
        ways
        for ways in product(range(3), repeat=3)
        if all(s.ways[w].peak_bytes <= b for s, w, b in zip(stages, ways, budgets, strict=True))
    ]
    least = min(step_of(timing, stages, ways) for ways in every)
    assert choice.seconds == pytest.approx(least, rel=1e-8)
    assert choice.seconds == step_of(timing, stages, choice.ways)
    for ways in every:
        smaller = [
            s.ways[w].peak_bytes - s.ways[c].peak_bytes
            for s, w, c in zip(stages, ways, choice.ways, strict=True)
        ]
        if max(smaller) <= 0 and min(smaller) < 0:  # less memory, and more nowhere
            assert step_of(timing, stages, ways) > least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_choice_when_few_timings_then_never_slower_than_separate_ones_and_in_budget(
    seed: int,
) -> None:
    draw = random.Random(seed)
    order = order_pipeline(Pipeline(schedule="1f1b", stages=16, microbatches=16))
    timing, stages = JobTiming(order), draw_stages(order, draw, count=4)
    budgets = [draw.choice((40, 60, 80, 100)) for _ in stages]
    most_timings = draw.choice((5, 40, 90))
    choice = choose_ways(timing, stages, budgets, most_timings=most_timings)
    assert choice is not None
    assert choice.seconds <= choice.separate_seconds * (1 + 1e-8)
    assert choice.timings <= most_timings + 2  # the first two are not the search's
    pairs = zip(stages, choice.ways, budgets, strict=True)
    assert all(own.ways[way].peak_bytes <= budget for own, way, budget in pairs)
    assert choice == choose_ways(timing, stages, budgets, most_timings=most_timings)


def test_choice_when_few_timings_for_many_stages_then_blocks_of_them_shrink_together() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=32, microbatches=32))
    fast = [(100, 1.0, 2.0), (60, 1.0, 2.1), (30, 1.0, 2.2)]
    stages = [stage_of(order, stage, fast) for stage in range(31)]
    stages.append(stage_of(order, 31, [(100, 2.0, 4.0), (50, 2.0, 8.0)]))
    choice = choose_ways(JobTiming(order), stages, [100] * 32, tolerance=0.05, most_timings=40)
    assert choice is not None
    assert choice.timings <= 40
    assert choice.ways == (2,) * 31 + (0,)


def test_choice_when_a_stage_has_no_way_in_its_budget_then_none() -> None:
    order = read_actions({0: ["0F0", "0B0"]})
    assert choose_ways(JobTiming(order), [stage_of(order, 0, [(10, 1.0, 1.0)])], [9]) is None
