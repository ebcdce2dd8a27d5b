"""A plan with less memory, where the step may take longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit.ir.plans import Plan, Prediction
from swapkit.planning.selection.cases import ODD_STEPS, Outcome, Stage, Timing
from swapkit.planning.selection.lean_trials import ROUNDS, SETTLING, STEPS
from tests.support.learning import (
    DEVIATING,
    LEAN,
    OTHER_SHAPE,
    SHAPE,
    LeanPlans,
    Plans,
    learner,
    run,
    seconds,
    warm_up,
)

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.learner import Learner

OWN = "1.0"
COUNT = SETTLING + STEPS
SLOWER = 1.05


class Predicted(Plans):
    """Makes plans with a prediction."""

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        prediction = Prediction(seconds=1.0, peak_bytes=100)
        return tuple(
            Plan(
                decisions=each.decisions,
                budget_bytes=each.budget_bytes,
                policy=each.policy,
                prediction=prediction,
            )
            for each in super().__call__(trace, share=share, count=count)
        )


def settled() -> Learner:
    """A learner that follows its own plan."""
    made = learner(Predicted(count=1))
    warm_up(made)
    assert run(made, seconds(1.0)) == [OWN]
    return made


def try_lean(made: Learner, lean: float, own: float = 1.0) -> list[str]:
    """Run the steps of one round; return which plans they followed."""
    return run(made, seconds(*[own] * COUNT, *[lean] * COUNT))


def test_lean_plan_when_its_steps_are_as_short_then_it_is_followed() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5]
    assert try_lean(made, 1.0) == [OWN] * COUNT + [LEAN] * COUNT
    assert run(made, seconds(1.0, 1.0)) == [LEAN, LEAN]
    assert made.replans == 0


def test_lean_plan_when_its_steps_are_longer_then_the_own_plan_stays() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(1.5, plans)
    for _ in range(ROUNDS):
        assert try_lean(made, SLOWER) == [OWN] * COUNT + [LEAN] * COUNT
    assert made.stage is Stage.STABLE
    assert run(made, seconds(1.0, 1.0)) == [OWN, OWN]
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5]  # it is not tried again for the same time
    assert run(made, seconds(1.0)) == [OWN]


def test_lean_plan_when_single_steps_are_unusual_then_the_others_count() -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans())
    own = [0.1, 0.1, 0.5, 1.0, 1.0, 1.0, 1.0]
    lean = [9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 9.0]
    assert [len(own), len(lean)] == [COUNT, COUNT]
    run(made, seconds(*own, *lean))
    assert run(made, seconds(1.0)) == [LEAN]


def test_lean_plan_when_it_seemed_slower_in_one_round_then_both_rounds_count() -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans())
    try_lean(made, SLOWER)
    run(made, seconds(*[1.2] * COUNT, *[1.0] * COUNT))
    assert run(made, seconds(1.0)) == [LEAN]


@pytest.mark.parametrize("most_seconds", [0.0, 1.2])
def test_lean_plan_when_another_time_comes_in_the_middle_of_the_trial_then_the_own_plan_stays(
    most_seconds: float,
) -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans())
    assert run(made, seconds(*[1.0] * (COUNT + 1)))[-1] == LEAN
    made.lean_within(most_seconds, LeanPlans(peak_bytes=100))  # no plan takes less memory
    assert run(made, seconds(0.95, *[1.0] * COUNT)) == [OWN] * (COUNT + 1)
    assert made.case is not None
    assert made.case.own is not None
    assert made.case.own.policy == OWN
    assert run(made, [Outcome(seconds=1.0, rescues=1)]) == [OWN]


@pytest.mark.parametrize("step", range(COUNT))
def test_lean_plan_when_a_trial_needs_a_rescue_then_the_own_plan_stays(step: int) -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans())
    run(made, seconds(*[1.0] * (COUNT + step)))
    assert run(made, [Outcome(seconds=1.0, rescues=1)]) == [LEAN]
    assert made.stage is Stage.STABLE
    assert run(made, seconds(*[1.0] * 4)) == [OWN] * 4
    assert made.replans == 0


def test_lean_plan_when_it_needs_a_rescue_later_then_the_own_plan_is_back() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(1.5, plans)
    try_lean(made, 1.0)
    assert run(made, [Outcome(seconds=1.0, rescues=1), *seconds(1.0)]) == [LEAN, OWN]
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5]
    assert made.replans == 0


def test_lean_plan_when_its_time_is_about_the_same_then_it_stays_and_nothing_is_asked() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(1.5, plans)
    try_lean(made, 1.0)
    made.lean_within(1.51, plans)
    assert plans.asked == [1.5]
    assert run(made, seconds(1.0)) == [LEAN]


def test_lean_plan_when_there_is_less_time_then_another_is_tried_beside_the_own_plan() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(1.5, plans)
    try_lean(made, 1.0)
    made.lean_within(1.2, plans)
    assert plans.asked == [1.5, 1.2]
    for _ in range(ROUNDS):
        assert try_lean(made, SLOWER) == [OWN] * COUNT + [LEAN] * COUNT
    assert run(made, seconds(1.0)) == [OWN]


def test_lean_plan_when_no_time_is_left_then_the_own_plan_is_followed() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(0.0, plans)
    made.lean_within(1.5, plans)
    try_lean(made, 1.0)
    made.lean_within(0.0, plans)
    assert plans.asked == [1.5]
    assert run(made, seconds(1.0)) == [OWN]


def test_lean_plan_when_it_takes_as_much_memory_then_it_is_not_tried() -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans(peak_bytes=100))
    assert made.stage is Stage.STABLE
    assert run(made, seconds(1.0, 1.0)) == [OWN, OWN]


def test_lean_plan_when_planning_fails_then_raises_once_and_the_own_plan_stays() -> None:
    made = settled()
    plans = LeanPlans(error=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        made.lean_within(1.5, plans)
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5]
    assert run(made, seconds(1.0, 1.0)) == [OWN, OWN]


def test_lean_plan_when_steps_deviate_in_its_trial_then_the_next_step_is_recorded() -> None:
    made, plans = settled(), LeanPlans()
    made.lean_within(1.5, plans)
    run(made, [DEVIATING] * (ODD_STEPS + 1))
    assert made.case is not None
    assert made.case.own is None
    warm_up_again = run(made, seconds(1.0))
    assert warm_up_again == ["record"]
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5]  # there is no own plan now


def test_lean_plan_when_the_own_plan_is_replaced_then_it_is_asked_for_again() -> None:
    made, plans = settled(), LeanPlans(peak_bytes=100)
    made.lean_within(1.5, plans)
    assert run(made, [Outcome(seconds=1.0, rescues=1), *seconds(1.0)]) == [OWN, "2.0"]
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5, 1.5]


def test_lean_plan_when_the_search_is_not_over_then_it_is_not_asked_for() -> None:
    made, plans = learner(Predicted(count=2)), LeanPlans()
    made.lean_within(1.5, plans)
    warm_up(made)
    made.lean_within(1.5, plans)
    assert plans.asked == []
    run(made, seconds(1.0, 1.0))
    made.lean_within(1.5, plans)
    assert plans.asked == [1.5]


def test_kinds_when_a_second_one_is_recorded_then_there_is_more_than_one() -> None:
    made = learner(Plans(count=1))
    assert not made.has_one_kind
    warm_up(made)
    assert made.has_one_kind
    run(made, seconds(1.0), OTHER_SHAPE)
    assert made.has_one_kind
    warm_up_other = run(made, seconds(1.0), OTHER_SHAPE)
    assert warm_up_other == ["record"]


def test_trials_when_they_run_then_the_session_stays_stable_with_its_own_plan() -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans())
    for _ in range(2 * COUNT):
        assert made.stage is Stage.STABLE
        assert made.case is not None
        assert [made.case.chosen, made.find_plan().plans[0]] == [made.case.own] * 2
        run(made, seconds(1.0))
    assert made.case is not None
    assert made.case.chosen is made.case.lean.plan


def test_trials_when_the_device_runs_asynchronously_then_each_is_timed_by_two_steps() -> None:
    made = settled()
    made.lean_within(1.5, LeanPlans())
    done = []
    for _ in range(4 * COUNT):
        instruction = made.begin(SHAPE)
        assert instruction.plan is not None
        done.append((instruction.plan.policy, instruction.timing))
        is_led = instruction.timing is Timing.LEAD
        made.end(Outcome(seconds=9.0 if is_led else 1.0, timing=instruction.timing))
    steps = [
        (name, timing) for name in (OWN, LEAN) for timing in (Timing.LEAD, Timing.PACE) * COUNT
    ]
    assert done == steps
    assert made.begin(SHAPE).timing is Timing.HOST
    assert run(made, seconds(1.0)) == [LEAN]
