"""Plans for less memory than there is, or for large storages only."""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import replace

import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.planner import make_plan
from swapkit.planning.policies.stage_swap import AimedPolicy, StageSwapPolicy
from swapkit.simulation.lowering import lower
from tests.support.layers import UNIT, layered_trace
from tests.support.random_traces import random_trace

MACHINE = Machine(budget_bytes=1 << 40, out_bytes_per_second=4e9, in_bytes_per_second=4e9)
TRACE = layered_trace(6)
PEAK = TRACE.peak_bytes


def least_bytes() -> int:
    with pytest.raises(InfeasibleBudget) as raised:
        make_plan(TRACE, replace(MACHINE, budget_bytes=1), "swap")
    return raised.value.least_bytes


@pytest.mark.promise("C7")
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_plan_when_a_reduction_is_asked_for_then_the_peak_is_so_much_lower(share: float) -> None:
    reduction = int(share * (PEAK - least_bytes()))
    plan = make_plan(TRACE, MACHINE, AimedPolicy(reduction_bytes=reduction))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= PEAK - reduction
    assert {decision.action for decision in plan.decisions} == {Action.SWAP}
    assert plan.budget_bytes == PEAK - reduction
    assert plan.bound_seconds is not None
    assert plan.prediction.seconds >= plan.bound_seconds * (1 - 1e-9)


def test_plan_when_the_budget_is_lower_than_the_aim_then_the_budget_holds() -> None:
    budget = (PEAK + least_bytes()) // 2
    plan = make_plan(TRACE, replace(MACHINE, budget_bytes=budget), AimedPolicy(reduction_bytes=1))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= budget


def test_plan_when_the_aim_is_out_of_reach_then_the_least_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        plan = make_plan(TRACE, MACHINE, AimedPolicy(reduction_bytes=PEAK))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= least_bytes()
    assert "no plan reaches a peak of 1 B" in caplog.text


def test_plan_when_nothing_fits_the_budget_then_infeasible() -> None:
    with pytest.raises(InfeasibleBudget):
        make_plan(TRACE, replace(MACHINE, budget_bytes=UNIT), AimedPolicy(reduction_bytes=UNIT))


def test_plan_when_sizes_are_filtered_then_smaller_ones_stay() -> None:
    budget = replace(MACHINE, budget_bytes=(PEAK + least_bytes()) // 2)
    free = make_plan(TRACE, budget, AimedPolicy())
    filtered = make_plan(TRACE, budget, AimedPolicy(least_bytes=6 * UNIT))
    sizes = [TRACE.storages[each.storage].nbytes for each in filtered.decisions]
    assert min(sizes) >= 6 * UNIT
    assert any(TRACE.storages[each.storage].nbytes < 6 * UNIT for each in free.decisions)
    bound = lower_bound(lower(TRACE), budget)
    assert filtered.bound_seconds == free.bound_seconds == pytest.approx(bound)


@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("seed", [11, 53, 90, 149, 321, 347])
def test_plan_when_sizes_are_filtered_then_it_is_legal_however_slow_the_link(
    seed: int, policy: str
) -> None:
    trace = random_trace(seed)
    sizes = sorted(each.nbytes for each in trace.storages if each.is_saved)
    aimed = AimedPolicy(policy=policy, least_bytes=sizes[len(sizes) // 2])
    planned = 0
    for share, speed in itertools.product((0.6, 0.8, 0.9), (30.0, 300.0, 3000.0)):
        machine = Machine(
            budget_bytes=int(share * trace.peak_bytes),
            out_bytes_per_second=speed,
            in_bytes_per_second=speed,
        )
        with contextlib.suppress(InfeasibleBudget):
            planned += bool(make_plan(trace, machine, aimed).decisions)
    assert planned or policy == "recompute"


@pytest.mark.promise("C10")
def test_plan_when_stages_have_a_bucket_then_theirs_where_it_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stages = StageSwapPolicy(bucket_bytes=4 * UNIT, least_bytes=UNIT)
    plan = make_plan(TRACE, MACHINE, AimedPolicy(stages=stages))
    assert plan.decisions == make_plan(TRACE, MACHINE, stages).decisions != ()
    assert not caplog.text
    tight = replace(MACHINE, budget_bytes=least_bytes())
    other = make_plan(TRACE, tight, AimedPolicy(stages=stages))
    assert other.prediction is not None
    assert other.prediction.peak_bytes <= tight.budget_bytes
    assert "swapping by stage does not reach" in caplog.text
