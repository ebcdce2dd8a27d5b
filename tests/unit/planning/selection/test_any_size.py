"""Steps that save other sizes each time: the learner has their plan followed at any size."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from swapkit.planning.selection.cases import (
    ODD_STEPS,
    ROUNDS,
    Outcome,
    Stage,
    StepMode,
)
from swapkit.planning.selection.learner import (
    Learner,
)
from tests.support.learning import (
    RECORDED,
    SHAPE,
    Plans,
    learner,
    run,
    seconds,
    warm_up,
)

if TYPE_CHECKING:
    from swapkit.planning.selection.learner import Learner


def resize(*sizes: int, rescues: int = 0) -> list[Outcome]:
    """Return steps that leave the plan because a saved tensor has these bytes."""
    return [
        Outcome(seconds=1.0, deviation="another size", resized_bytes=each, rescues=rescues)
        for each in sizes
    ]


def is_for_any_size(made: Learner) -> bool:
    return made.begin(SHAPE).for_any_length


@pytest.mark.promise("C12")
def test_steps_when_sizes_differ_from_step_to_step_then_the_plan_is_followed_at_any() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    assert run(made, resize(8, 16)) == ["1.0", "1.0"]
    assert is_for_any_size(made)
    assert run(made, seconds(*[1.0] * 9)) == ["1.0"] * 9
    assert made.stage is Stage.STABLE
    assert made.replans == 0


def test_steps_when_another_size_stays_then_the_next_is_recorded() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    assert run(made, [*resize(8, 8), RECORDED]) == ["1.0", "1.0", "record"]
    assert not is_for_any_size(made)
    assert run(made, [*resize(8), *seconds(1.0), *resize(16)]) == ["2.0"] * 3  # not in a row
    assert not is_for_any_size(made)


def test_steps_at_any_size_when_plans_for_less_run_out_then_the_next_is_recorded() -> None:
    plans = Plans(count=1)
    made = learner(plans)
    warm_up(made)
    run(made, resize(8, 16))
    run(made, [Outcome(seconds=1.0, rescues=1)] * (ROUNDS + ODD_STEPS))
    assert len(plans.shares) == 1 + ROUNDS
    assert run(made, [Outcome(seconds=1.0, rescues=1), RECORDED])[-1] == "record"
    assert is_for_any_size(made)


def test_steps_at_any_size_when_some_need_a_rescue_then_few_are_recorded() -> None:
    made, draw = learner(Plans(count=1)), random.Random(1)
    warm_up(made)
    recorded = 0
    for size in range(8, 4000):
        step = made.begin(SHAPE)
        if step.mode is StepMode.RECORD:
            made.end(RECORDED)
            recorded += 1
        elif step.for_any_length:
            made.end(Outcome(seconds=1.0, rescues=int(draw.random() < 0.3)))
        else:
            made.end(resize(size)[0])
    assert recorded <= 12  # each time, twice as many steps pass before the next
