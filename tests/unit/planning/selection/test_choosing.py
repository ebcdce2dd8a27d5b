"""Which of the plans that were tried is followed, by what was predicted and what steps took."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from swapkit.ir.plans import Plan, Prediction
from swapkit.planning.selection.cases import FASTER, Outcome, StepMode, Timing
from swapkit.planning.selection.learner import TIMED_STEPS, Learner
from tests.support.learning import RECORDED, SHAPE, run, seconds, warm_up

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace


@dataclass
class Predicting:
    """Makes plans whose steps are predicted to take so many seconds, which are their names, too."""

    predictions: tuple[float, ...]

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        assert trace is RECORDED.trace
        return tuple(
            Plan(
                decisions=(),
                budget_bytes=int(1000 * share),
                policy=str(each),
                prediction=Prediction(seconds=each, peak_bytes=0),
            )
            for each in self.predictions[:count]
        )


def searching(*predictions: float) -> Learner:
    made = Learner(Predicting(predictions), profile_steps=2, search_steps=4)
    warm_up(made)
    return made


def paced(*values: float, is_host_bound: bool = True) -> list[Outcome]:
    """Steps of a device that works behind the host's back: of each two the second tells."""
    steps = []
    for each in values:
        steps.append(Outcome(seconds=each / 2, timing=Timing.LEAD))
        pace = Outcome(seconds=each, timing=Timing.PACE, is_host_bound=is_host_bound)
        steps.append(pace)
    return steps


def followed(made: Learner) -> str:
    plan = made.begin(SHAPE).plan
    assert plan is not None
    return plan.policy


def test_search_when_steps_take_longer_than_predicted_then_each_plan_is_timed_once_more() -> None:
    made = searching(0.7, 0.8, 0.9)
    tried = run(made, paced(1.5, 1.3, 0.8, 1.0, 1.1, 1.4))  # first steps with a plan map memory
    assert tried == [*["0.7"] * 4, *["0.8"] * 2, *["0.9"] * 4, *["0.7"] * 2]
    run(made, paced(1.3))
    assert followed(made) == "0.8"
    assert made.case is not None
    assert [trial.seconds for trial in made.case.trials] == [0.8, 1.0, 1.3]


def test_search_when_the_best_prediction_had_a_disturbed_trial_then_it_is_tried_again() -> None:
    made = searching(0.7, 0.8)
    tried = run(made, paced(1.5, 1.3, 0.8, 0.7))
    assert tried == [*["0.7"] * 4, *["0.8"] * 2, *["0.7"] * 2]
    assert followed(made) == "0.7"
    made = searching(0.7, 0.8)
    run(made, paced(0.9, 0.9, 0.8, 2.0, 2.0))
    assert followed(made) == "0.8"
    assert made.case is not None
    assert [trial.seconds for trial in made.case.trials] == [0.8, 0.9]  # of the same plan the best


def test_search_when_steps_in_a_row_are_as_fast_as_the_device_then_the_host_was_no_limit() -> None:
    made = searching(0.7, 0.8)
    run(made, paced(0.7, 0.9, 0.9))
    assert made.case is not None
    assert [trial.is_host_bound for trial in made.case.trials] == [False, True]
    made = searching(0.7, 0.8)
    run(made, paced(0.9, 0.9, 0.9, 0.9, is_host_bound=False))  # a device slower than predicted
    assert made.case is not None
    assert not any(trial.is_host_bound for trial in made.case.trials)


def test_search_when_a_plan_is_slower_on_the_host_then_another_than_was_predicted_is_followed() -> (
    None
):
    made = searching(0.7, 0.8)
    run(made, paced(1.2, 1.2, 0.8, 1.2, 1.2))  # as swapping beside recomputation, for a slow host
    assert followed(made) == "0.8"


def test_search_when_steps_differ_by_next_to_nothing_then_the_best_prediction_is_followed() -> None:
    made = searching(0.7, 0.8, 0.9)
    run(made, seconds(1.0 / FASTER - 0.001, 1.0, 1.1))
    assert followed(made) == "0.7"


def test_search_when_the_device_took_longer_than_predicted_then_the_fastest_is_followed() -> None:
    made = searching(0.7, 0.8, 0.9)
    run(made, seconds(1.5, 1.4, 1.3, 1.5))
    assert followed(made) == "0.9"


def test_search_when_a_plan_needed_rescues_then_its_prediction_does_not_count() -> None:
    made = searching(0.7, 0.8)
    run(made, [*paced(1.2, 1.2), Outcome(seconds=1.0, rescues=1)])
    run(made, [Outcome(seconds=2.0, rescues=1), Outcome(seconds=1.0, rescues=1)])
    assert followed(made) == "0.7"


def test_search_when_a_plan_for_more_memory_needed_a_rescue_then_the_others_are_enough() -> None:
    def plans(trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        asked.append(share)
        others = Predicting((0.7, 0.8))(trace, share=share, count=count)
        return (*others, replace(others[0], budget_bytes=1000, policy="tight"))

    asked: list[float] = []
    made = Learner(plans, profile_steps=2, search_steps=4)
    warm_up(made)
    assert run(made, [*seconds(1.0, 1.1), Outcome(seconds=0.5, rescues=1)])[2] == "tight"
    assert followed(made) == "0.7"
    assert len(asked) == 1


def test_steps_when_candidates_are_compared_then_the_device_is_waited_for_and_else_not() -> None:
    made = searching(0.7, 0.8)
    outcomes = [*paced(0.7, 1.0, 1.0), *seconds(*[1.0] * TIMED_STEPS)]
    timings = []
    for outcome in outcomes:
        instruction = made.begin(SHAPE)
        assert instruction.mode is StepMode.FOLLOW
        timings.append(instruction.timing)
        made.end(outcome)
    searched = [Timing.LEAD, Timing.PACE] * 3
    assert timings == [
        *searched,
        *[Timing.HOST] * TIMED_STEPS,
    ]  # a stable step is as without a session


def test_pace_when_the_chosen_plan_is_known_then_it_is_that_of_many_steps() -> None:
    made = searching(0.5, 0.5)
    run(made, seconds(2.0, 3.0))  # single ones, with what comes once
    case = made.case
    assert case is not None
    assert case.pace == pytest.approx(5.0)
    run(made, seconds(*[1.0] * TIMED_STEPS))
    assert case.pace == pytest.approx(2.0)


def test_pace_when_a_plan_is_followed_without_a_trial_then_it_is_that_of_its_steps() -> None:
    made = searching(0.5)
    case = made.case
    assert case is not None
    assert case.pace == pytest.approx(1.0)  # as predicted, until it is known
    run(made, seconds(*[1.0] * TIMED_STEPS))
    assert case.pace == pytest.approx(2.0)
    run(made, [Outcome(seconds=1.0, rescues=1)] * 2)  # a plan for less memory replaces it
    assert made.replans == 1
    assert case.pace == pytest.approx(2.0)
    run(made, seconds(*[1.5] * TIMED_STEPS))
    assert case.pace == pytest.approx(3.0)


def test_pace_when_a_plan_is_given_then_it_is_that_of_its_steps() -> None:
    made = Learner(Predicting(()), profile_steps=2, search_steps=4)
    assert RECORDED.trace is not None
    (plan,) = Predicting((0.5,))(RECORDED.trace, share=1.0, count=1)
    made.adopt(SHAPE, RECORDED.trace, plan)
    run(made, seconds(*[1.0] * TIMED_STEPS))
    assert made.case is not None
    assert made.case.pace == pytest.approx(2.0)
