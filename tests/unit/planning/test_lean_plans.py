"""The plan with the least memory within a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.ir.plans import Action, Plan
from swapkit.planning.lean_plans import make_lean_plan, make_lean_plans
from swapkit.planning.planner import PlanTarget, find_floor, make_plan
from swapkit.simulation.validator import find_violations
from tests.support.matrix_layers import ACTIVATION, layers, machine
from tests.support.random_traces import random_trace

TRACE = layers(6)
AMPLE = machine(TRACE.peak_bytes, bytes_per_second=1.0)  # too slow to swap
SLACKS = (0.0, 1.0, 2.0, 3.0)


def peak_of(plan: Plan | None) -> int:
    assert plan is not None
    assert plan.prediction is not None
    return plan.prediction.peak_bytes


def seconds_of(plan: Plan | None) -> float:
    assert plan is not None
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def find_least(most_seconds: float) -> int:
    """Return the least peak of the fastest plans for all budgets that are fast enough."""
    peaks = []
    for budget_bytes in range(find_floor(TRACE, AMPLE, "auto"), TRACE.peak_bytes + 1, ACTIVATION):
        plan = make_plan(TRACE, replace(AMPLE, budget_bytes=budget_bytes))
        if seconds_of(plan) <= most_seconds:
            peaks.append(peak_of(plan))
    return min(peaks)


@pytest.mark.parametrize("slack", SLACKS)
def test_plan_when_the_step_may_take_longer_then_no_budget_that_is_fast_enough_is_smaller(
    slack: float,
) -> None:
    most_seconds = TRACE.seconds + slack
    plan = make_lean_plan(TRACE, AMPLE, "auto", most_seconds)
    assert seconds_of(plan) <= most_seconds + 1e-6
    assert peak_of(plan) <= find_least(most_seconds)


def test_plan_when_the_step_may_take_longer_still_then_it_takes_less_and_less_memory() -> None:
    peaks = [peak_of(make_lean_plan(TRACE, AMPLE, "auto", TRACE.seconds + each)) for each in SLACKS]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[0] == TRACE.peak_bytes


def test_plan_when_there_is_no_limit_to_speak_of_then_it_takes_the_least_that_has_a_plan() -> None:
    plan = make_lean_plan(TRACE, AMPLE, "auto", 1e6)
    assert peak_of(plan) == find_floor(TRACE, replace(AMPLE, budget_bytes=1), "auto")


def test_plan_when_no_plan_is_fast_enough_then_none() -> None:
    assert make_lean_plan(TRACE, AMPLE, "auto", 0.9 * TRACE.seconds) is None


def test_plan_when_none_fits_the_budget_then_none() -> None:
    assert make_lean_plan(TRACE, replace(AMPLE, budget_bytes=1), "auto", 1e6) is None


def test_plan_when_a_policy_is_named_then_it_uses_that_action_only() -> None:
    fast = replace(AMPLE, out_bytes_per_second=1e4, in_bytes_per_second=1e4)
    for policy, action in (("swap", Action.SWAP), ("recompute", Action.RECOMPUTE)):
        plan = make_lean_plan(TRACE, fast, policy, TRACE.seconds + 3.0)
        assert plan is not None
        assert {each.action for each in plan.decisions} == {action}


@pytest.mark.parametrize("seed", range(10))
def test_plan_when_made_twice_then_the_same_and_legal(seed: int) -> None:
    trace = random_trace(seed)
    ample = machine(trace.peak_bytes, bytes_per_second=300.0)
    most_seconds = 1.1 * trace.seconds
    plan = make_lean_plan(trace, ample, "auto", most_seconds)
    assert plan is not None
    assert plan == make_lean_plan(trace, ample, "auto", most_seconds)
    assert seconds_of(plan) <= most_seconds * (1 + 1e-6)
    assert not find_violations(trace, plan, replace(ample, budget_bytes=plan.budget_bytes))


def test_plans_when_asked_for_a_share_then_no_plan_takes_more_than_that_or_than_ranks_alike() -> (
    None
):
    for share, most_bytes in ((0.8, AMPLE.budget_bytes), (1.0, int(0.8 * AMPLE.budget_bytes))):
        target = PlanTarget(machine=AMPLE, most_bytes=most_bytes)
        (plan,) = make_lean_plans(
            TRACE, share=share, count=1, most_seconds=1e6, target=target, policy="auto"
        )
        assert plan.budget_bytes <= 0.8 * AMPLE.budget_bytes
        assert plan.prediction is not None
        assert plan.prediction.reserved_bytes > 0
        none = make_lean_plans(
            TRACE, share=share, count=1, most_seconds=TRACE.seconds, target=target, policy="auto"
        )
        assert none == ()
