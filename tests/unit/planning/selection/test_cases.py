"""A plan that was found is followed until there is a reason that comes again, and is worth it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from swapkit.planning.selection.cases import (
    ODD_STEPS,
    RECORDINGS,
    RECURRENCES,
    REGULAR_STEPS,
    ROUNDS,
    SHARE,
    WATCHED_STEPS,
    Outcome,
    Stage,
    StepMode,
)
from swapkit.planning.selection.learner import CASES_KEPT, Learner
from tests.support.learning import (
    BUDGET,
    DEVIATING,
    RECORDED,
    SHAPE,
    Plans,
    learner,
    run,
    seconds,
    warm_up,
)


def test_stable_steps_when_rescued_and_less_is_infeasible_then_plans_for_the_least() -> None:
    plans = Plans(count=1, least_share=0.99, knows_least=True)
    made = learner(plans)
    warm_up(made)
    assert run(made, [Outcome(seconds=1.0, rescues=1), *seconds(1.0)]) == ["1.0", "2.0"]
    assert plans.shares == [1.0, pytest.approx(0.99, abs=2 / BUDGET)]
    run(made, [Outcome(seconds=1.0, rescues=1)] * 20)
    assert len(plans.shares) == 2
    assert made.replans == 1


def test_search_when_rescued_and_less_is_infeasible_then_plans_for_the_least() -> None:
    plans = Plans(count=2, least_share=0.99, knows_least=True)
    made = learner(plans)
    warm_up(made)
    rescued = Outcome(seconds=1.0, rescues=1)
    assert run(made, [rescued, *seconds(3.0, 2.0, 1.0)]) == ["1.0", "2.0", "2.1", "2.1"]
    assert plans.shares == [1.0, pytest.approx(0.99, abs=2 / BUDGET)]
    assert made.stage is Stage.STABLE
    run(made, [rescued] * 20)  # there is none for less
    assert len(plans.shares) == 2
    assert made.replans == 1


@dataclass
class Clock:
    """Planning takes so many seconds."""

    planning_seconds: float
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.planning_seconds  # it is read before and after
        return self.now


def proven(plans: Plans, planning_seconds: float = 0.0) -> Learner:
    """Return a learner whose plan has held for a while."""
    made = Learner(plans, profile_steps=2, search_steps=4, clock=Clock(planning_seconds))
    warm_up(made)
    run(made, seconds(*[1.0] * REGULAR_STEPS))
    assert made.stage is Stage.STABLE
    return made


def test_recording_when_it_is_lost_then_it_costs_as_much_and_its_time_is_not_usual() -> None:
    slow = replace(RECORDED, seconds=5.0)
    lost = replace(slow, trace=None, is_lost=True)
    made = Learner(Plans(count=1), profile_steps=3, search_steps=4, clock=Clock(0.0))
    assert run(made, [*seconds(1.0, 1.0), lost, slow]) == ["rescue", "rescue", "record", "record"]
    assert made.case is not None
    assert made.case.cost_seconds == 2 * (5.0 - 1.0)
    assert list(made.case.seconds) == [1.0, 1.0]


@pytest.mark.promise("C4")
def test_stable_steps_when_the_host_is_noisy_then_nothing_is_recorded_or_planned() -> None:
    plans = Plans(count=1)
    made = proven(plans)
    chance = random.Random(0)
    for step in range(300):
        slow = 10.0 if step % 16 == 5 else chance.uniform(0.8, 2.0)  # a collector's pause
        odd = "another" if step % 25 == 7 else ""
        is_rescued = step % (WATCHED_STEPS + 4) == 3
        run(made, [Outcome(seconds=slow, deviation=odd, rescues=int(is_rescued))])
    run(made, seconds(*[5.0] * 100))  # other programs, for long
    assert made.stage is Stage.STABLE
    assert made.replans == 0
    assert made.reason == ""
    assert len(plans.shares) == 1


@pytest.mark.promise("C5")
def test_proven_plan_when_rescues_come_again_then_planned_once_for_less_and_says_why() -> None:
    plans = Plans(count=1)
    made = proven(plans)
    rescued = Outcome(seconds=1.0, rescues=1)
    assert run(made, [rescued, *seconds(1.0, 1.0)]) == ["1.0"] * 3
    assert made.replans == 0
    assert run(made, [rescued] * (RECURRENCES - 1)) == ["1.0"] * (RECURRENCES - 1)
    assert run(made, seconds(*[1.0] * 50)) == ["2.0"] * 50
    assert made.replans == 1
    assert "2 of the last 12 steps needed a rescue: planning for 96.0%" in made.reason


@pytest.mark.promise("C5")
def test_proven_plan_when_steps_become_others_for_good_then_recorded_once_and_says_why() -> None:
    plans = Plans(count=1)
    made = proven(plans)
    done = run(made, [*[DEVIATING] * (ODD_STEPS + 1), RECORDED, *seconds(*[1.0] * 50)])
    assert done.count("record") == 1
    assert done[-1] == "2.0"
    assert made.replans == 1
    assert "2 steps in a row deviated; the last: another" in made.reason
    assert made.reason.endswith("recording the next step")


def test_proven_plan_when_more_is_in_use_before_rescued_steps_then_recorded_if_it_comes_again() -> (
    None
):
    made = proven(Plans(count=1))
    heavier = Outcome(seconds=1.0, rescues=1, is_heavier=True)
    assert run(made, [heavier, *seconds(1.0), heavier, RECORDED]) == ["1.0"] * 3 + ["record"]
    assert "more memory in use" in made.reason


def test_recordings_when_they_cost_much_then_they_are_a_small_share_of_the_steps() -> None:
    cost, steps = 5.0, 2000
    plans = Plans(count=1)
    made = proven(plans, planning_seconds=cost)
    done = []
    for step in range(steps):  # others come in between, twice in a row
        instruction = made.begin(SHAPE)
        done.append(instruction.mode)
        if instruction.mode is StepMode.RECORD:
            made.end(RECORDED)
        else:
            made.end(DEVIATING if step % 12 < 2 else Outcome(seconds=1.0))
    assert done.count(StepMode.RECORD) * cost <= SHARE * steps + RECORDINGS * cost


def test_recordings_when_more_shapes_come_than_are_kept_then_they_are_a_small_share() -> None:
    cost, steps = 5.0, 3000
    plans = Plans(count=1)
    made = Learner(plans, profile_steps=2, search_steps=4, clock=Clock(cost))
    chance = random.Random(0)
    recorded = 0
    for _ in range(steps):
        is_recorded = (
            made.begin(f"shape {chance.randrange(2 * CASES_KEPT)}").mode is StepMode.RECORD
        )
        recorded += is_recorded
        made.end(RECORDED if is_recorded else Outcome(seconds=1.0))
    assert recorded * cost <= SHARE * steps + (CASES_KEPT + 1) * cost


def test_plans_for_less_when_more_shapes_come_than_are_kept_then_they_count_as_recordings_do() -> (
    None
):
    cost, steps = 0.5, 3000
    plans = Plans(count=1)
    made = Learner(plans, profile_steps=2, search_steps=4, clock=Clock(cost))
    chance = random.Random(0)
    for _ in range(steps):  # every plan needs rescues, and so `ROUNDS` others follow it
        is_recorded = made.begin(f"shape {chance.randrange(20)}").mode is StepMode.RECORD
        made.end(RECORDED if is_recorded else Outcome(seconds=1.0, rescues=1))
    assert len(plans.shares) * cost <= SHARE * steps + (CASES_KEPT + 1) * cost


def test_plans_for_less_when_steps_change_for_good_then_the_next_recording_waits_for_them() -> None:
    cost, steps = 5.0, 3000
    plans = Plans(count=1)
    made = proven(plans, planning_seconds=cost)
    for step in range(steps):  # every plan needs rescues, and two odd steps come now and then
        odd = "another" if step % 120 < ODD_STEPS + 1 else ""
        is_recorded = made.begin(SHAPE).mode is StepMode.RECORD
        made.end(RECORDED if is_recorded else Outcome(seconds=1.0, rescues=1, deviation=odd))
    assert len(plans.shares) * cost <= SHARE * steps + RECORDINGS * (1 + ROUNDS) * cost
