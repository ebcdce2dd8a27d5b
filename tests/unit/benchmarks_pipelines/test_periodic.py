"""Estimated curves: what one microbatch holds, times the microbatches in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.pipelines import periodic
from benchmarks.pipelines.choice import choose_ways
from benchmarks.pipelines.curves import measure_curve
from benchmarks.pipelines.orders import count_in_flight
from benchmarks.pipelines.periodic import estimate_curves
from benchmarks.pipelines.schedules import SCHEDULES, order_of
from benchmarks.pipelines.timetables import Pipeline, order_pipeline
from tests.support.matrix_layers import ACTIVATION, GIVEN, WEIGHT, layers, machine
from tests.unit.benchmarks_pipelines.small import record

if TYPE_CHECKING:
    from benchmarks.pipelines.microbatches import MicrobatchRecording


def test_curve_when_nothing_moves_then_as_counted_by_hand() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=4, microbatches=8))
    curves = estimate_curves(record(order, [[layers(2)]] * 4), machine(1), shares=(1.0,))
    for stage, curve in enumerate(curves):
        (way,) = curve.ways
        assert way.peak_bytes == WEIGHT + (4 - stage) * (GIVEN + 2 * ACTIVATION)
        assert curve.total_seconds(0) == 8 * (2 * 1.0 + 2 * 2.0)
        assert way.recompute_seconds == way.swapped_bytes == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_curve_when_less_is_held_then_more_time_and_an_upper_bound_of_the_memory(name: str) -> None:
    order = order_of(name, ranks=2, microbatches=4)
    recordings = record(order, [[layers(3)] * len(own) for own in order.places])
    curves = estimate_curves(recordings, machine(1), policy="recompute")
    bubbles = recordings.find_bubbles()
    for stage, curve in enumerate(curves):
        trace = recordings.compose(stage, bubbles[stage], keeps_empty=True)
        assert curve.ways[0].peak_bytes >= trace.peak_bytes
        if sum(count_in_flight(order.jobs[stage])) > 3:
            assert min(way.peak_bytes for way in curve.ways) < curve.ways[0].peak_bytes
        for number, way in enumerate(curve.ways):
            assert curve.total_seconds(number) >= curve.total_seconds(0)
            exact = measure_curve(trace, machine(way.peak_bytes), policy="recompute", shares=())
            assert exact.ways  # a plan of the whole step needs no more


def test_curve_when_the_pipeline_waits_for_some_microbatches_then_these_may_keep_their_bytes() -> (
    None
):
    order = order_pipeline(Pipeline(schedule="1f1b", stages=4, microbatches=8))
    slow = layers(3, forward=1.5, backward=3.0)
    recordings = record(order, [[layers(3)]] * 3 + [[slow]])
    curves = estimate_curves(recordings, machine(1), policy="recompute")
    free = max(recordings.timing.run([each for s in range(4) for each in recordings.seconds_of(s)]))
    choice = choose_ways(recordings.timing, curves, [1 << 40] * 4)
    assert choice is not None
    assert choice.seconds == pytest.approx(free)
    kept, chosen = (
        sum(own.ways[way].peak_bytes for own, way in zip(curves, ways, strict=True))
        for ways in ((0,) * 4, choice.ways)
    )
    assert chosen < 0.9 * kept
    assert curves[0].ways[choice.ways[0]].recompute_seconds > 0
    # One of the ways: all but the last microbatch recompute.
    kinds = curves[0].kinds
    assert [way for way in curves[0].ways if way.costs[kinds[-1]].seconds < way.costs[1].seconds]
    assert kinds[-1] != kinds[-2] == 1


def test_curves_when_many_stages_then_each_kind_of_microbatch_is_planned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = []

    class CountedStep(periodic._WaitingStep):
        def __init__(self, recorded: MicrobatchRecording, *, is_split: bool) -> None:
            planned.append(recorded)
            super().__init__(recorded, is_split=is_split)

    monkeypatch.setattr(periodic, "_WaitingStep", CountedStep)
    order = order_pipeline(Pipeline(schedule="1f1b", stages=64, microbatches=64))
    inner, last = layers(2), layers(3)
    recordings = record(order, [[inner]] * 63 + [[last]])
    curves = estimate_curves(recordings, machine(1), shares=(1.0, 0.5))
    assert len(curves) == 64
    assert len(planned) == 2
