"""What a session does next: warm-up, search, stable, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit.ir.plans import Plan
from swapkit.planning.selection.cases import (
    ODD_STEPS,
    PATIENCE,
    RECORDINGS,
    REGULAR_STEPS,
    ROUNDS,
    Outcome,
    Stage,
    StepMode,
)
from swapkit.planning.selection.learner import (
    CASES_KEPT,
    EXTRA_STEPS,
    MARGIN,
    STRANGERS,
    TIMED_STEPS,
    Learner,
)
from tests.support.learning import (
    BUDGET,
    DEVIATING,
    OTHER_SHAPE,
    RECORDED,
    SHAPE,
    Plans,
    learner,
    run,
    seconds,
    warm_up,
)

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace


@pytest.mark.promise("C1")
def test_search_when_candidates_ran_then_fastest_measured_is_followed() -> None:
    made = learner(Plans())
    warm_up(made)
    assert made.stage == "search"
    assert run(made, seconds(3.0, 1.0, 2.0)) == ["1.0", "1.1", "1.2"]
    assert made.stage == "stable"
    assert run(made, seconds(9.0, 9.0)) == ["1.1", "1.1"]
    assert made.replans == 0


def test_search_when_a_candidate_needed_a_rescue_then_the_rest_are_plans_for_less() -> None:
    plans = Plans()
    made = learner(plans)
    warm_up(made)
    outcomes = [Outcome(seconds=0.5, rescues=1), *seconds(3.0, 2.0, 4.0)]
    assert run(made, outcomes) == ["1.0", "2.0", "2.1", "2.2"]
    assert plans.shares[0] > plans.shares[1]
    assert made.stage is Stage.STABLE
    assert run(made, seconds(1.0)) == ["2.1"]  # the first was faster, but did not hold
    assert made.replans == 1


def test_plans_when_made_then_some_memory_is_left_free_if_that_is_possible() -> None:
    for least_share, share in ((0.0, 1 - MARGIN), (0.99, 1.0)):
        plans = Plans(least_share=least_share)
        made = learner(plans)
        warm_up(made)
        assert plans.shares == [share]
        assert run(made, seconds(3.0, 1.0, 2.0, 1.0)) == ["1.0", "1.1", "1.2", "1.1"]


def test_plans_when_that_much_cannot_be_left_free_then_at_least_what_pieces_take() -> None:
    for least_share, shares in ((0.985, [0.99]), (0.995, [1.0]), (0.5, [1 - MARGIN])):
        plans = Plans(least_share=least_share)
        made = Learner(plans, profile_steps=2, search_steps=4, spare=0.01)
        warm_up(made)
        assert plans.shares == shares


def test_plans_when_a_session_loses_more_memory_then_that_much_is_left_free_if_possible() -> None:
    for least_share, shares in ((0.9, [0.95]), (0.97, [0.99]), (0.995, [1.0])):
        plans = Plans(least_share=least_share)
        made = Learner(plans, profile_steps=2, search_steps=4, margin=0.01, spare=0.01)
        for share in (0.2, 0.05):
            made.leave_free(share)
        warm_up(made)
        assert plans.shares == shares


def test_plans_when_more_is_to_be_left_free_then_it_is_until_memory_runs_out() -> None:
    plans = Plans()
    made = Learner(plans, profile_steps=2, search_steps=4, margin=0.25)
    warm_up(made)
    run(made, [Outcome(seconds=1.0, rescues=1)])
    assert plans.shares == [0.75, pytest.approx(0.75 - MARGIN)]


@pytest.mark.promise("C4")
def test_steps_when_stable_then_nothing_is_recorded() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    assert made.stage is Stage.STABLE
    assert run(made, seconds(*[1.0] * 50)) == ["1.0"] * 50


def test_search_when_no_candidate_holds_then_ends_all_the_same_with_the_fewest_rescues() -> None:
    plans = Plans()
    made = learner(plans)
    warm_up(made)
    rescues = [5, 4, 3, 1, 2, 2]
    assert len(rescues) == 4 + EXTRA_STEPS
    done = run(made, [Outcome(seconds=1.0, rescues=each) for each in rescues])
    assert made.stage is Stage.STABLE
    assert len(plans.shares) == 1 + ROUNDS
    assert plans.shares == sorted(plans.shares, reverse=True)
    assert run(made, seconds(1.0)) == [done[3]]
    run(made, [Outcome(seconds=1.0, rescues=1)] * 20)
    assert len(plans.shares) == 1 + ROUNDS


@pytest.mark.promise("C5")
def test_stable_step_when_rescued_then_plans_for_less_from_the_trace_at_hand() -> None:
    plans = Plans(count=1)
    made = learner(plans)
    warm_up(made)
    assert run(made, [*seconds(1.0), Outcome(seconds=1.0, rescues=2), *seconds(1.0)]) == [
        "1.0",
        "1.0",
        "2.0",
    ]
    assert plans.shares[1] < plans.shares[0]
    assert made.replans == 1


def test_stable_step_when_less_is_infeasible_then_keeps_the_plan() -> None:
    made = learner(Plans(count=1, least_share=0.99))
    warm_up(made)
    assert run(made, [Outcome(seconds=1.0, rescues=2), *seconds(1.0)]) == ["1.0", "1.0"]
    assert made.stage is Stage.STABLE


@pytest.mark.promise("C5")
def test_stable_steps_when_they_deviate_then_the_next_is_recorded() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    assert run(made, [DEVIATING] * (ODD_STEPS + 1)) == ["1.0"] * (ODD_STEPS + 1)
    assert made.stage is Stage.WARMUP
    assert run(made, [RECORDED, *seconds(1.0)]) == ["record", "2.0"]
    assert made.replans == 1


def test_stable_step_when_a_single_one_deviates_then_the_plan_is_kept() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    assert run(made, [DEVIATING, *seconds(1.0)] * 5) == ["1.0"] * 10
    assert made.stage is Stage.STABLE
    assert made.replans == 0


def test_candidate_when_it_deviates_then_tried_again_and_then_the_step_is_recorded() -> None:
    made = learner(Plans())
    warm_up(made)
    assert run(made, [DEVIATING, DEVIATING, RECORDED]) == ["1.0", "1.0", "record"]
    assert made.stage is Stage.SEARCH


def test_stable_step_when_rescued_with_more_in_use_before_it_then_the_next_is_recorded() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    assert run(made, [Outcome(seconds=1.0, is_heavier=True)] * 2) == ["1.0"] * 2
    heavier = Outcome(seconds=1.0, rescues=1, is_heavier=True)
    assert run(made, [heavier, RECORDED, *seconds(1.0)]) == ["1.0", "record", "2.0"]


@pytest.mark.promise("C12")
def test_steps_when_they_always_deviate_then_recorded_ever_more_seldom() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    done = run(made, [DEVIATING if at < 2 else RECORDED for at in range(3)] * (RECORDINGS - 1))
    assert done.count("record") == RECORDINGS - 1
    for doubled in range(3):
        patience = PATIENCE << doubled
        plan = chosen_by(made)
        assert run(made, [DEVIATING] * (patience + 1)) == [plan] * (patience + 1)
        assert run(made, [RECORDED]) == ["record"]
        assert made.stage is Stage.STABLE  # one plan, which is not tried: no two steps compare


def chosen_by(made: Learner) -> str:
    assert made.case is not None
    assert made.case.chosen is not None
    return made.case.chosen.policy


def test_steps_when_they_are_regular_again_then_a_change_is_recorded_soon() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    run(made, [DEVIATING if at < 2 else RECORDED for at in range(3)] * (RECORDINGS - 1))
    run(made, seconds(*[1.0] * REGULAR_STEPS))
    assert run(made, [*[DEVIATING] * (ODD_STEPS + 1), RECORDED])[-1] == "record"


def test_chosen_plan_when_the_machine_becomes_slower_then_followed_for_good() -> None:
    made = learner(Plans())
    warm_up(made)
    run(made, seconds(2.0, 1.0, 1.5))
    assert made.stage is Stage.STABLE
    assert run(made, seconds(*[9.0] * 3 * TIMED_STEPS)) == ["1.1"] * 3 * TIMED_STEPS
    assert made.replans == 0


@pytest.mark.promise("C12")
def test_shapes_when_each_comes_once_then_one_plan_for_all_is_followed() -> None:
    plans = Plans()
    made = learner(plans)
    done = [run(made, seconds(1.0), f"shape {number}")[0] for number in range(STRANGERS)]
    assert done == ["rescue"] * STRANGERS
    assert run(made, [RECORDED], "shape a") == ["record"]
    assert run(made, seconds(1.0), "shape b") == run(made, seconds(1.0), "shape c") == ["1.0"]
    assert run(made, [Outcome(seconds=1.0, rescues=1, deviation="another")], "d") == ["1.0"]
    assert run(made, seconds(1.0), "shape e") == ["2.0"]
    assert plans.shares[1] < plans.shares[0]
    assert run(made, seconds(1.0, 1.0), "shape e") == ["2.0", "2.0"]
    assert run(made, [RECORDED, *seconds(1.0)], "shape e") == ["record", "3.0"]  # it recurs
    assert run(made, seconds(1.0), "shape f") == ["2.0"]


def test_step_when_it_is_begun_anew_then_the_first_beginning_leaves_no_trace() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    for number in range(2 * CASES_KEPT):
        made.begin(f"evaluation {number}")
        assert run(made, seconds(1.0)) == ["1.0"]


def test_policy_when_it_raises_then_the_error_comes_through_and_rescue_goes_on() -> None:
    class Failing(Plans):
        def __call__(self, *_: object, **_options: object) -> tuple[Plan, ...]:
            raise KeyError("mine")

    made = learner(Failing())
    run(made, seconds(1.0))
    made.begin(SHAPE)
    with pytest.raises(KeyError, match="mine"):
        made.end(RECORDED)
    assert run(made, seconds(1.0, 1.0)) == ["rescue", "rescue"]
    assert made.case is not None
    assert "mine" in made.case.why_none


class Stopping(Plans):
    """Plans whose making is stopped at some calls."""

    def __init__(self, *, at: int) -> None:
        super().__init__(count=1)
        self.calls, self.at = 0, at

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().__call__(trace, share=share, count=count)


def test_first_plan_when_its_making_is_interrupted_then_the_next_step_is_recorded_again() -> None:
    made = learner(Stopping(at=1))
    run(made, seconds(1.0))
    made.begin(SHAPE)
    with pytest.raises(KeyboardInterrupt):
        made.end(RECORDED)
    assert run(made, [RECORDED, *seconds(1.0)]) == ["record", "1.0"]


def test_plan_when_the_making_of_another_is_interrupted_then_it_is_followed_on() -> None:
    made = learner(Stopping(at=2))
    warm_up(made)
    made.begin(SHAPE)
    with pytest.raises(KeyboardInterrupt):
        made.end(Outcome(seconds=1.0, rescues=1))
    assert run(made, seconds(1.0, 1.0)) == ["1.0", "1.0"]
    assert made.case is not None
    assert made.case.why_none == ""
    assert made.replans == 0


def test_plans_when_shapes_alternate_then_each_shape_keeps_its_own() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    warm_up(made, OTHER_SHAPE)
    for _ in range(3):
        assert run(made, seconds(1.0)) == ["1.0"]
        assert run(made, seconds(1.0), OTHER_SHAPE) == ["2.0"]
    assert made.replans == 0


def test_shapes_when_too_many_then_the_oldest_is_forgotten() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    for number in range(CASES_KEPT):
        warm_up(made, f"shape {number}")
    assert run(made, seconds(1.0)) == ["rescue"]
    assert made.stage is Stage.WARMUP


def test_budget_when_infeasible_then_rescue_goes_on_and_says_why() -> None:
    made = learner(Plans(least_share=2.0))
    warm_up(made)
    assert made.stage is Stage.STABLE
    assert made.case is not None
    assert made.case.why_none == "too little"
    assert run(made, seconds(1.0, 1.0)) == ["rescue", "rescue"]


def test_adopted_plan_when_its_shape_comes_then_followed_at_once() -> None:
    made = learner(Plans())
    assert RECORDED.trace is not None
    made.adopt(SHAPE, RECORDED.trace, Plan(decisions=(), budget_bytes=BUDGET, policy="saved"))
    assert run(made, seconds(1.0)) == ["saved"]
    assert made.stage is Stage.STABLE
    assert made.begin(OTHER_SHAPE).mode is StepMode.RESCUE


def test_adopted_plan_when_made_before_it_mattered_which_modules_train_then_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = learner(Plans())
    assert RECORDED.trace is not None
    made.adopt(SHAPE, RECORDED.trace, Plan(decisions=(), budget_bytes=BUDGET, policy="saved"))
    made.begin(SHAPE)  # when the session begins
    assert run(made, seconds(1.0, 1.0), f"{SHAPE}-norm") == ["saved", "saved"]
    assert not caplog.records
    assert run(made, seconds(1.0), SHAPE) == ["rescue"], "of one kind of steps only"
    assert run(made, seconds(1.0), f"{SHAPE}-other") == ["rescue"]
    assert not caplog.records, "it was followed"


def test_adopted_plan_when_for_one_set_of_training_modules_then_not_followed_with_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = learner(Plans())
    assert RECORDED.trace is not None
    plan = Plan(decisions=(), budget_bytes=BUDGET, policy="saved")
    made.adopt(f"{SHAPE}-norm", RECORDED.trace, plan)
    assert run(made, seconds(1.0), f"{SHAPE}-other") == ["rescue"]
    assert run(made, seconds(1.0), SHAPE) == ["rescue"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not following the given plan" in caplog.text
    assert run(made, seconds(1.0), f"{SHAPE}-norm") == ["saved"]


def test_profile_when_one_step_then_the_first_is_recorded() -> None:
    made = learner(Plans(count=1), profile_steps=1)
    assert run(made, [RECORDED, *seconds(1.0)]) == ["record", "1.0"]
