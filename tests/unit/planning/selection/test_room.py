"""Plans that leave more memory free, where moves of free memory take long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.plans import Action, Decision, Plan, Prediction
from swapkit.planning.beside import at_once
from swapkit.planning.selection.cases import Stage
from swapkit.planning.selection.learner import MARGIN, MOVING, ROOM, ROOMIER, Learner
from swapkit.planning.selection.outcomes import Outcome
from tests.support.learning import SHAPE, Gated, run, warm_up

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace

BUDGET = 1000
TIGHT = 1 - MARGIN
LONG = 2 * MOVING  # of a step of one second


class Plans:
    """Makes two plans for the budget, and one for each smaller share down to the least."""

    def __init__(self, least_share: float = 0.0) -> None:
        self.least_share = least_share
        self.shares: list[float] = []

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        del trace
        self.shares.append(share)
        if share < self.least_share:
            raise InfeasibleBudget("too little", least_bytes=int(BUDGET * self.least_share))
        return tuple(plan(share, index) for index in range(1 if count == 1 else 2))


def plan(share: float, index: int) -> Plan:
    """Return a plan that moves more storages the less memory there is."""
    moved = round(100 * (1 - share)) + index
    return Plan(
        decisions=tuple(Decision(storage=each, action=Action.SWAP) for each in range(moved)),
        budget_bytes=int(BUDGET * share),
        policy=f"{share:.2f} {index}",
        prediction=Prediction(seconds=0.9, peak_bytes=0),
    )


def search(plans: Plans) -> Learner:
    made = Learner(plans, profile_steps=2, search_steps=2)
    warm_up(made)
    return made


def step(seconds: float = 1.0, *, moving: float = 0.0, rescues: int = 0) -> Outcome:
    return Outcome(seconds=seconds, moving_seconds=moving, rescues=rescues)


def test_search_when_moves_take_long_then_the_plan_that_leaves_more_free_is_followed() -> None:
    plans = Plans()
    made = search(plans)
    done = run(made, [step(moving=LONG), step(moving=LONG), step(), step()])
    assert done == ["0.98 0", "0.98 1", "0.86 0", "0.86 0"]
    assert plans.shares == pytest.approx([TIGHT, TIGHT - ROOM])
    assert made.stage is Stage.STABLE
    assert made.replans == 0


def test_search_when_moves_take_little_then_no_other_plan_is_made() -> None:
    plans = Plans()
    made = search(plans)
    run(made, [step(moving=MOVING / 2)] * 3)
    assert made.stage is Stage.STABLE
    assert plans.shares == [TIGHT]


def test_search_when_more_room_helps_but_moves_still_take_long_then_even_more_is_left() -> None:
    plans = Plans()
    made = search(plans)
    run(made, [step(moving=3 * LONG)] * 2 + [step(moving=2 * LONG), step(moving=LONG)])
    assert plans.shares == pytest.approx([TIGHT, TIGHT - ROOM, TIGHT - 2 * ROOM])
    assert len(plans.shares) == 1 + ROOMIER  # and no more than that
    assert run(made, [step()]) == ["0.74 0"]


def test_search_when_more_room_is_slower_twice_then_the_best_of_the_others_is_followed() -> None:
    plans = Plans()
    made = search(plans)
    done = run(made, [step(moving=LONG), step(1.2, moving=LONG), step(1.3), step(1.3), step()])
    assert done == ["0.98 0", "0.98 1", "0.86 0", "0.86 0", "0.98 0"]
    assert len(plans.shares) == 2  # more room would not help either


def test_search_when_only_the_first_step_with_more_room_is_slow_then_the_next_one_counts() -> None:
    made = search(Plans())
    done = run(made, [step(moving=LONG), step(moving=LONG), step(1.5), step(), step()])
    assert done[2:] == ["0.86 0"] * 3
    assert made.stage is Stage.STABLE


def test_search_when_there_is_no_plan_for_so_little_then_half_the_room_is_left() -> None:
    plans = Plans(least_share=0.9)
    made = search(plans)
    done = run(made, [step(moving=LONG), step(moving=LONG), step()])
    assert plans.shares == pytest.approx([TIGHT, TIGHT - ROOM, TIGHT - ROOM / 2])
    assert done[2] == "0.92 0"


def test_search_when_there_is_no_plan_for_less_then_the_best_is_followed() -> None:
    made = search(Plans(least_share=TIGHT))
    assert run(made, [step(moving=LONG)] * 3)[2] == "0.98 0"
    assert made.stage is Stage.STABLE


def test_search_when_plans_are_made_beside_then_the_best_is_followed_meanwhile() -> None:
    with at_once(value=False):
        plans = Plans()
        made = Learner(plans, profile_steps=2, search_steps=2)
        warm_up(made)  # these plans are made at once
        gate = Gated(plans)
        made.plan_beside(lambda: gate)
        assert run(made, [step(moving=LONG)] * 4)[2:] == ["0.98 0"] * 2
        gate.finish(made)
        assert run(made, [step(), step(), step()]) == ["0.98 0", "0.86 0", "0.86 0"]


def test_stable_when_the_plan_with_more_room_needs_a_rescue_then_the_next_is_for_less() -> None:
    plans = Plans()
    made = search(plans)
    run(made, [step(moving=LONG), step(moving=LONG), step()])
    assert made.begin(SHAPE).plan == plan(TIGHT - ROOM, 0)
    run(made, [step(rescues=1)])
    assert plans.shares[-1] == pytest.approx(TIGHT - ROOM - MARGIN)
