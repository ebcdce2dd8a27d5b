"""Adaptive recompute: thresholds that are tried, over steps that need more than was planned."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, field

import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import Trace
from swapkit.planning.policies.adaptive_recompute import (
    WATCHED_STEPS,
    AdaptiveRecompute,
    ThresholdLearner,
)
from swapkit.planning.selection.cases import Outcome, StepMode

MIB = 1 << 20
SHAPE = "8x16"
RECORDED = Outcome(seconds=1.0, trace=Trace(operators=(), storages=()))
LIMIT, LEAST = 1000 * MIB, 200 * MIB


@dataclass
class Plans:
    """Plans to recompute as many MiB as the threshold is below the limit."""

    least_bytes: int = LEAST
    made: list[int] = field(default_factory=list)  # budgets

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        assert trace is RECORDED.trace
        assert count == 1
        budget_bytes = int(LIMIT * share)
        self.made.append(budget_bytes)
        if budget_bytes < self.least_bytes:
            raise InfeasibleBudget("too little", least_bytes=self.least_bytes)
        decisions = tuple(
            Decision(storage=storage, action=Action.RECOMPUTE)
            for storage in range((LIMIT - budget_bytes) // MIB)
        )
        return (Plan(decisions=decisions, budget_bytes=budget_bytes, policy="recompute"),)


def learner(plans: Plans, *, most: int = LIMIT, profile_steps: int = 3) -> ThresholdLearner:
    policy = AdaptiveRecompute(limit_bytes=LIMIT, most_bytes=most)
    made = policy.make_learner(plans, profile_steps=profile_steps, search_steps=4)
    for step in range(profile_steps):
        is_last = step == profile_steps - 1
        assert made.begin(SHAPE).mode is (StepMode.RECORD if is_last else StepMode.RESCUE)
        assert made.stage == "warmup"
        made.end(RECORDED if is_last else Outcome(seconds=1.0))
    return made


def run(made: ThresholdLearner, capacity: int) -> int:
    """Run a step on a device of this capacity; return the bytes that its plan takes."""
    plan = made.begin(SHAPE).plan
    assert plan is not None
    made.end(Outcome(seconds=1.0, rescues=int(plan.budget_bytes > capacity)))
    return plan.budget_bytes


@pytest.mark.promise("A5")
@pytest.mark.parametrize("capacity", [1000, 999, 640, 333, 260])
def test_search_when_the_capacity_is_less_then_as_figure_1_draws_it(
    capacity: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = learner(Plans())
    probes = []
    while made.stage == "search":
        probes.append(run(made, capacity * MIB))
    assert probes[0] == LIMIT
    assert len(probes) <= math.ceil(math.log2(LIMIT / MIB)) + 2
    assert made.stage == "stable"
    assert {run(made, capacity * MIB) for _ in range(30)} == {capacity * MIB}
    assert made.replans == 0
    first, *events = caplog.messages
    assert first == "search: the first threshold is 1000.00 MiB"
    for threshold, event in zip(probes, events, strict=False):
        came = "ran out" if threshold > capacity * MIB else "held"
        assert event.startswith(f"threshold {threshold / MIB:.2f} MiB: memory {came}; ")
    assert all("; next: " in event for event in events[:-1])
    assert all("found: " not in event for event in events[:-1])
    assert events[-1].endswith(f"found: {capacity}.00 MiB")


def test_search_when_a_size_is_given_then_it_begins_there() -> None:
    made = learner(Plans(), most=400 * MIB)
    assert run(made, LIMIT) == 400 * MIB
    assert made.stage == "stable"


@pytest.mark.promise("A8")
def test_threshold_when_nothing_fits_it_then_as_much_is_recomputed_as_can_be() -> None:
    plans = Plans()
    made = learner(plans, most=MIB)
    assert run(made, LIMIT) == LEAST + 1
    assert made.stage == "stable"
    assert plans.made == [MIB, LEAST + 1]


def test_search_when_not_even_the_least_holds_then_it_stays_with_that() -> None:
    plans = Plans()
    made = learner(plans)
    for _ in range(60):
        used = run(made, 100 * MIB)
    assert used == LEAST + 1
    assert made.stage == "stable"
    assert len(plans.made) <= 12


def test_search_when_nothing_fits_the_limit_then_there_is_no_plan_and_a_reason() -> None:
    made = learner(Plans(least_bytes=LIMIT + 1))
    assert made.stage == "stable"
    assert made.case is not None
    assert made.case.why_none == "too little"
    assert made.begin(SHAPE).mode is StepMode.RESCUE


@pytest.mark.promise("A5")
def test_stable_step_when_memory_runs_out_soon_then_searches_below() -> None:
    made = learner(Plans())
    assert [run(made, LIMIT) for _ in range(4)] == [LIMIT] * 4
    run(made, 700 * MIB)
    assert made.stage == "search"
    assert made.replans == 1
    while made.stage == "search":
        run(made, 700 * MIB)
    assert run(made, 700 * MIB) == 700 * MIB


def test_stable_step_when_memory_runs_out_late_then_the_next_is_recorded() -> None:
    made = learner(Plans())
    for _ in range(WATCHED_STEPS + 3):
        run(made, LIMIT)
    run(made, 700 * MIB)
    assert made.stage == "stable", "once is by chance"
    run(made, 700 * MIB)
    assert made.stage == "warmup"
    assert made.replans == 1
    assert made.begin(SHAPE).mode is StepMode.RECORD


def test_search_when_it_makes_plans_then_their_time_counts_as_cost_of_the_case() -> None:
    plans = Plans()
    made = learner(plans)
    assert made.case is not None
    before, cost = len(plans.made), made.case.cost_seconds
    times = itertools.count()
    made._clock = lambda: next(times)  # each plan takes a second
    for _ in range(20):
        run(made, 700 * MIB)
    assert made.case.cost_seconds - cost == len(plans.made) - before > 0


def test_plan_when_it_was_made_before_then_it_is_followed_and_may_retreat() -> None:
    made = AdaptiveRecompute(limit_bytes=LIMIT, most_bytes=LIMIT).make_learner(
        Plans(), profile_steps=3, search_steps=4
    )
    (plan,) = Plans()(RECORDED.trace, share=0.9, count=1)  # type: ignore[arg-type]
    made.adopt(SHAPE, RECORDED.trace, plan)  # type: ignore[arg-type]
    assert run(made, LIMIT) == run(made, 0) == 900 * MIB
    assert made.replans == 1


def test_plan_when_making_it_fails_then_the_error_is_the_users_and_the_next_steps_do_without() -> (
    None
):
    def fail(*_: object, **__: object) -> tuple[Plan, ...]:
        raise ZeroDivisionError("theirs")

    policy = AdaptiveRecompute(limit_bytes=LIMIT, most_bytes=LIMIT)
    made = policy.make_learner(fail, profile_steps=1, search_steps=4)
    made.begin(SHAPE)
    with pytest.raises(ZeroDivisionError):
        made.end(RECORDED)
    assert made.begin(SHAPE).mode is StepMode.RESCUE
