"""What a page shows of a record: the planned step, or why there is none; steps as few points."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from swapkit.reporting.html.views import MOST_HOLDERS, view_run, view_step, why_no_plan
from swapkit.simulation.occupancy import Layer, find_peak, measure_occupancy
from swapkit.simulation.timeline import simulate
from tests.support.run_records import make_record, make_steps

RECORD = make_record()


def test_step_when_there_is_a_plan_then_simulated_at_the_measured_pace() -> None:
    view = view_step(RECORD)
    assert view is not None
    assert RECORD.plan is not None
    assert RECORD.plan.prediction is not None
    assert view.is_planned
    assert view.occupancy.end == pytest.approx(RECORD.pace * RECORD.plan.prediction.seconds)
    assert max(view.occupancy.in_use()) <= RECORD.stats.budget_bytes
    assert max(view.occupancy.layers[Layer.PLAIN]) > RECORD.stats.budget_bytes
    assert len(view.reasons) >= len(RECORD.plan.decisions)
    assert max(each.end for each in view.blocks) == pytest.approx(view.occupancy.end)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (replace(RECORD, plan=None, why_no_plan="too small"), "too small"),
        (replace(RECORD, plan=None, stage="search"), "in stage 'search' after 30 steps"),
        (replace(RECORD, machine=None), "did not measure the speed of the links"),
    ],
)
def test_step_when_it_has_no_plan_to_follow_then_the_plain_one_and_why(
    record: object, why: str
) -> None:
    view = view_step(record)  # type: ignore[arg-type]
    assert view is not None
    assert why in view.why_not_planned
    assert view.occupancy.in_use() == list(view.occupancy.layers[Layer.PLAIN])
    assert view.reasons == ()


def test_step_when_its_plan_does_not_fit_the_machine_then_the_plain_one_and_why() -> None:
    assert RECORD.plan is not None
    tight = replace(RECORD, plan=replace(RECORD.plan, budget_bytes=1))
    view = view_step(tight)
    assert view is not None
    assert "cannot be simulated" in view.why_not_planned
    assert max(view.occupancy.layers[Layer.HOST]) == 0


def test_step_when_none_was_recorded_then_none_and_why() -> None:
    record = replace(RECORD, trace=None, plan=None)
    assert view_step(record) is None
    assert why_no_plan(record) == "no step was recorded yet (30 steps, stage 'stable')"
    assert "policy='rescue'" in why_no_plan(replace(record, policy="rescue"))


def test_steps_when_there_are_many_then_few_points_that_keep_peaks_and_sums() -> None:
    steps = list(make_steps(10_000, 1 << 30))
    steps[7777] = replace(steps[7777], seconds=9.0, rescues=4, peak_bytes=1 << 31)
    points = view_run(steps, most=1500)
    assert len(points) <= 1500
    assert (points[0].first, points[-1].last) == (1, 10_000)
    assert all(a.last + 1 == b.first for a, b in itertools.pairwise(points))
    assert sum(each.rescues for each in points) == sum(each.rescues for each in steps)
    assert max(each.seconds for each in points) == 9.0
    assert max(each.peak_bytes for each in points) == 1 << 31
    assert [each.first for each in view_run(steps[:3])] == [1, 2, 3]
    assert view_run([]) == []


def test_peak_when_its_holders_are_listed_then_at_most_ten_the_largest_first() -> None:
    view = view_step(RECORD)
    assert view is not None
    sizes = [each.nbytes for each in view.peak_holders]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < len(sizes) <= MOST_HOLDERS
    assert RECORD.trace is not None
    assert RECORD.plan is not None
    assert RECORD.machine is not None
    machine = replace(RECORD.machine, budget_bytes=RECORD.plan.budget_bytes)
    schedule = simulate(RECORD.trace, RECORD.plan, machine)
    there = find_peak(RECORD.trace, RECORD.plan, schedule)
    in_use = measure_occupancy(RECORD.trace, RECORD.plan, schedule).in_use()
    assert sum(each.nbytes for each in there) == max(in_use)


def test_parts_when_named_in_the_lane_then_by_their_path_up_to_its_number() -> None:
    view = view_step(RECORD)
    assert view is not None
    assert view.spans
    assert all(re.fullmatch(r"[a-z_.]+(\.\d+)?", each.name) for each in view.spans)
    assert all(one.end <= other.start for one, other in itertools.pairwise(view.spans))
