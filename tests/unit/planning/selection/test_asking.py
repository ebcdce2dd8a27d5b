"""Learners that go on while plans are made: what their steps do until there are any."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from swapkit.ir.plans import Plan
from swapkit.planning.beside import GivenUp, ThreadJob, at_once, go_on
from swapkit.planning.selection.cases import Outcome
from tests.support.learning import (
    OTHER_SHAPE,
    RECORDED,
    SHAPE,
    Gated,
    Plans,
    learner,
    run,
    seconds,
    warm_up,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit.planning.selection.learner import Learner

RESCUED = Outcome(seconds=1.0, rescues=1)


@pytest.fixture(autouse=True)
def _beside() -> Iterator[None]:
    with at_once(value=False):
        yield


def gated(plans: Plans) -> tuple[Learner, Gated]:
    made, gate = learner(plans), Gated(plans)
    made.plan_beside(lambda: gate)
    return made, gate


def test_plan_when_asked_for_while_it_is_made_then_waited_for_and_taken_up_as_ever() -> None:
    made, gate = gated(Plans(count=2))
    assert made.find_plan().plans == ()
    warm_up(made)
    gate.gates[0].release()
    (first,) = {made.find_plan().plans[:1], made.find_plan().plans[:1]}
    assert made.stage == "warmup"
    assert run(made, seconds(1.0)) == ["rescue"]
    assert made.find_plan().plans == first
    assert run(made, seconds(1.0, 0.5)) == ["1.0", "1.1"]
    assert made.case is not None
    assert made.find_plan().plans == (made.case.chosen,) != first


def test_steps_when_a_first_plan_is_found_quickly_then_follow_it_until_the_others_are_made() -> (
    None
):
    made, gate = gated(Plans(count=2))
    gate.first = Plan(decisions=(), budget_bytes=900, policy="first")
    warm_up(made)
    running = made._asking._running
    assert running is not None
    while running[0].first is None:
        time.sleep(0)
    made.begin(SHAPE)
    made.end(Outcome(seconds=1.0))  # a plan is taken at the end of a step
    assert made.stage == "search"
    assert run(made, [RESCUED, Outcome(seconds=1.0, deviation="another")]) == ["first"] * 2
    gate.finish(made)
    assert run(made, seconds(1.0, 1.0, 0.5)) == ["first", "1.0", "1.1"]
    assert made.case is not None
    assert (made.stage, made.case.chosen, made.replans) == ("stable", made.find_plan().plans[0], 0)
    gate.first = Plan(decisions=(), budget_bytes=900, policy="needless")
    assert run(made, [RESCUED, RESCUED]) == ["1.1"] * 2  # a plan to replace is followed meanwhile
    gate.finish(made)


def test_plan_when_asked_for_and_one_that_was_tried_has_failed_then_another() -> None:
    made, gate = gated(Plans(count=2))
    warm_up(made)
    gate.finish(made)
    run(made, seconds(1.0))
    tried = made.find_plan().plans
    assert run(made, [RESCUED]) == ["1.0"]
    gate.gates[0].release()
    assert made.find_plan().plans not in ((), tried)


def test_candidate_when_it_fails_then_steps_are_under_rescue_until_there_are_others() -> None:
    made, gate = gated(Plans(count=2))
    warm_up(made)
    assert run(made, seconds(1.0)) == ["rescue"]
    gate.finish(made)
    assert run(made, seconds(1.0)) == ["rescue"]
    assert run(made, [RESCUED]) == ["1.0"]
    assert made.stage == "search"
    assert run(made, seconds(1.0, 1.0)) == ["rescue", "rescue"]
    gate.finish(made)
    assert run(made, seconds(1.0, 1.0, 1.0)) == ["rescue", "2.0", "2.1"]
    assert made.stage == "stable"
    assert set(gate.threads) & {threading.current_thread()} == set()


def test_stable_plan_when_it_fails_then_followed_until_there_is_another() -> None:
    made, gate = gated(Plans(count=1))
    warm_up(made)
    gate.finish(made)
    assert run(made, seconds(1.0)) == ["rescue"]
    assert run(made, [RESCUED, RESCUED, Outcome(seconds=1.0, deviation="another")]) == ["1.0"] * 3
    assert made.stage == "stable"
    assert len(gate.threads) == 2
    gate.finish(made)
    assert run(made, seconds(1.0, 1.0)) == ["1.0", "2.0"]
    assert made.replans == 1


def test_shapes_when_several_wait_for_plans_then_they_are_made_one_after_the_other() -> None:
    made, gate = gated(Plans(count=1))
    warm_up(made)
    warm_up(made, OTHER_SHAPE)
    assert len(gate.threads) == 1
    gate.finish(made)
    assert run(made, seconds(1.0)) == ["rescue"]
    gate.finish(made)
    assert run(made, seconds(1.0, 1.0), OTHER_SHAPE) == ["rescue", "2.0"]
    assert run(made, seconds(1.0)) == ["1.0"]
    assert len(set(gate.threads)) == 2


def test_plans_when_the_steps_became_others_meanwhile_then_not_taken() -> None:
    made, gate = gated(Plans(count=1))
    warm_up(made)
    case = made.case
    assert case is not None
    made._forget(case, "others")
    gate.finish(made)
    assert run(made, [*seconds(1.0), RECORDED]) == ["record", "record"]
    assert case.chosen is None
    gate.finish(made)
    assert run(made, seconds(1.0, 1.0)) == ["rescue", "2.0"]


def test_learner_when_it_is_stopped_then_nothing_is_asked_for_any_more() -> None:
    made, gate = gated(Plans(count=1))
    made.stop()
    assert run(made, [*seconds(1.0), RECORDED, *seconds(1.0)], SHAPE) == [
        "rescue",
        "record",
        "rescue",
    ]
    assert not gate.threads


def test_job_when_no_thread_is_to_be_had_then_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    job = ThreadJob(threading.current_thread)
    assert job.is_done
    job.wait()
    assert job.take() is threading.current_thread()


def test_job_when_given_up_then_it_ends_without_a_result() -> None:
    begun = threading.Event()

    def work() -> None:
        while True:
            begun.set()
            go_on()

    job = ThreadJob(work)
    assert begun.wait(20)
    assert not job.is_done
    job.give_up()
    job.wait()
    assert job.take() is None
    go_on()  # this thread works for nobody


def test_given_up_when_a_planner_catches_errors_then_it_goes_through() -> None:
    assert not issubclass(GivenUp, Exception)
