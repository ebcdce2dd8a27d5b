"""Plans of all stages of a pipeline: legal, within budgets, and no slower than separate ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.pipelines.joint import PipelinePlan, plan_pipeline
from benchmarks.pipelines.schedules import SCHEDULES, order_of
from benchmarks.pipelines.timetables import Pipeline, order_pipeline
from swapkit.errors import InfeasibleBudget, InvalidArgument
from swapkit.planning.planner import find_floor
from swapkit.simulation.validator import find_violations
from tests.support.matrix_layers import ACTIVATION, layers, machine
from tests.unit.benchmarks_pipelines.small import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.machines import Machine


def check(plan: PipelinePlan, machines: Sequence[Machine]) -> None:
    """Every stage's plan is legal for its budget, and its times are those of the pipeline."""
    assert plan.is_settled
    for stage, own in zip(plan.stages, machines, strict=True):
        within = replace(own, budget_bytes=stage.plan.budget_bytes)
        assert find_violations(stage.trace, stage.plan, within, stage.schedule) == []
        assert stage.peak_bytes <= stage.plan.budget_bytes <= own.budget_bytes
        assert stage.busy_seconds + stage.idle_seconds == pytest.approx(plan.seconds)
        assert stage.schedule.prediction.seconds == pytest.approx(plan.seconds)


@pytest.mark.promise("D9")
@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_when_a_schedule_of_torch_then_legal_and_never_slower_than_separate(
    name: str,
) -> None:
    order = order_of(name, ranks=2, microbatches=4)
    recordings = record(order, [[layers(2)] * len(own) for own in order.places])
    traces = [recordings.compose(s, own) for s, own in enumerate(recordings.find_bubbles())]
    floors = [find_floor(trace, machine(1), "auto") for trace in traces]
    machines = [
        machine(floor + (trace.peak_bytes - floor) // 2)
        for floor, trace in zip(floors, traces, strict=True)
    ]
    plans = plan_pipeline(recordings, machines, shares=(0.5, 0.0))
    check(plans.joint, machines)
    check(plans.separate, machines)
    assert plans.joint.seconds <= plans.separate.seconds * (1 + 1e-8)
    assert plans.joint.seconds >= plans.free_seconds - 1e-9


def test_plans_when_everything_fits_then_no_loss() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=3))
    plans = plan_pipeline(record(order, [[layers(1)]] * 2), [machine(100_000)] * 2)
    assert plans.joint.seconds == plans.free_seconds == (3 + 1) * 3.0


def test_plans_when_the_last_stage_is_slow_then_the_first_takes_less_memory_for_nothing() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=6))
    slow = layers(2, forward=3.0, backward=6.0)
    plans = plan_pipeline(record(order, [[layers(2)], [slow]]), [machine(100_000)] * 2)
    assert plans.joint.seconds == pytest.approx(plans.free_seconds)
    assert plans.separate.seconds == pytest.approx(plans.free_seconds)
    first, alone = plans.joint.stages[0], plans.separate.stages[0]
    assert alone.peak_bytes - first.peak_bytes >= ACTIVATION
    assert first.busy_seconds + first.idle_seconds == pytest.approx(plans.free_seconds)


def test_plans_when_a_backward_waits_then_it_recomputes_before_its_gradient_arrives() -> None:
    # Stage 0: forwards 0-1 and 1-2, backwards 4-6 and 7-9. Both activations can be made again in
    # the bubbles before these, 2-4 and 6-7, and one of them is enough memory.
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=2))
    recordings = record(order, [[layers(1)], [layers(1)]])
    machines = [machine(10_000), machine(10_000)]
    plans = plan_pipeline(recordings, machines)
    check(plans.joint, machines)
    assert plans.joint.seconds == plans.free_seconds == 9.0
    first = plans.joint.stages[0]
    assert first.schedule.prediction.recompute_seconds == 2.0
    assert first.early_seconds == 2.0
    assert first.idle_seconds == 9.0 - 2 * 3.0 - 2.0
    assert plans.separate.stages[0].peak_bytes - first.peak_bytes == ACTIVATION


def test_plans_when_repeated_then_the_same() -> None:
    order = order_of("ZBVZeroBubble", ranks=2, microbatches=4)
    recordings = record(order, [[layers(2)] * 2] * 2)
    first, second = (plan_pipeline(recordings, [machine(5500)] * 2) for _ in range(2))
    assert first == second


def test_plans_when_a_stage_has_none_then_the_error_names_the_stage() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=3))
    recordings = record(order, [[layers(1)]] * 2)
    with pytest.raises(InfeasibleBudget, match="stage 1 of the pipeline: no plan") as caught:
        plan_pipeline(recordings, [machine(100_000), machine(900)])
    assert caught.value.least_bytes > 900
    with pytest.raises(InvalidArgument, match="policy"):
        plan_pipeline(recordings, [machine(100_000)] * 2, policy="fast")
