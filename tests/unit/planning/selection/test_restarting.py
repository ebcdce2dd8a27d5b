"""What a session does when all its steps become other ones."""

from __future__ import annotations

from swapkit.planning.selection.cases import Stage
from tests.support.learning import OTHER_SHAPE, RECORDED, SHAPE, Plans, learner, run, warm_up


def test_plans_when_all_steps_become_other_ones_then_each_shape_is_recorded_again() -> None:
    made = learner(Plans(count=1))
    warm_up(made)
    warm_up(made, OTHER_SHAPE)
    made.restart("they changed")
    assert made.replans == 1
    assert made.reason == "they changed: recording the next step"
    for shape in SHAPE, OTHER_SHAPE:
        assert run(made, [RECORDED], shape) == ["record"]
    assert made.replans == 1


def test_plan_when_there_was_none_for_the_former_steps_then_one_is_sought_again() -> None:
    plans = Plans(least_share=2.0)
    made = learner(plans)
    warm_up(made)
    assert made.case is not None
    assert made.case.why_none
    made.restart("they changed")
    assert made.stage is Stage.WARMUP
    assert run(made, [RECORDED]) == ["record"]
