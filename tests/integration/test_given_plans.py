"""Plans that were made without a session, and are followed in one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime.saved.device import Limits
from swapkit.errors import InvalidArgument, PlanMismatch
from tests.support.sessions import Plain, make_training, steady_machine_like, train, train_plainly

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan

STEPS = 5


pytestmark = pytest.mark.usefixtures("installation")


@pytest.fixture
def plain() -> Plain:
    return train_plainly(make_training, STEPS)


def make_plan_for(limit_bytes: int) -> Plan:
    training = make_training()
    training.step()
    trace = swapkit.record(training.step, training.model, training.optimizer)
    machine = steady_machine_like(None, Limits(budget_bytes=limit_bytes))
    return swapkit.plan(trace, machine=machine)


def test_plan_when_made_from_a_recorded_step_then_followed_from_the_first_step_on(
    plain: Plain,
) -> None:
    limit_bytes = plain.budget(0.7)
    made = make_plan_for(int(limit_bytes * 0.9))
    training = make_training()
    with swapkit.budget(limit_bytes, training.model, training.optimizer, plan=made) as session:
        log = train(session, training, STEPS)
        assert session.plan == made
        assert session.stats.swapped_out_bytes + session.stats.recomputed_regions > 0
        again = session.plan
    swapkit.budget(limit_bytes, training.model, training.optimizer, plan=again)  # it can be given
    assert log.stages == ["stable"] * STEPS
    assert log.replans[-1] == 0
    assert training.outcome() == plain.outcome


def test_plan_when_for_a_larger_budget_then_refused_on_entry(plain: Plain) -> None:
    made = make_plan_for(plain.budget(0.9))
    training = make_training()
    session = swapkit.budget(plain.budget(0.5), training.model, training.optimizer, plan=made)
    with pytest.raises(PlanMismatch, match="more than"), session:
        pytest.fail("was entered")


def test_plan_when_its_trace_is_not_known_then_says_what_to_give(plain: Plain) -> None:
    made = replace(make_plan_for(plain.budget(0.7)), trace=None)
    with pytest.raises(InvalidArgument, match=r"its trace.* Pass the plan that swapkit\.plan\(\)"):
        swapkit.budget("1GiB", make_training().model, plan=made)
