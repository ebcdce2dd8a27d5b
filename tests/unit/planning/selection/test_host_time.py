"""What the host takes for a step, and plans that mind it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from swapkit.ir.plans import Action, Decision, Plan, Prediction
from swapkit.ir.traces import HostTime, Trace
from swapkit.planning.beside import at_once
from swapkit.planning.selection.cases import Outcome, Stage, Timing, Tried, find_best
from swapkit.planning.selection.learner import Learner
from swapkit.planning.selection.taking import find_host_time
from tests.support.learning import SHAPE, Gated, run, warm_up

HOST = HostTime(step_seconds=1.0, swap_seconds=0.1, recompute_seconds=0.02)


def moving(swapped: int, recomputed: int, *, seconds: float = 0.5) -> Plan:
    actions = [Action.SWAP] * swapped + [Action.RECOMPUTE] * recomputed
    return Plan(
        decisions=tuple(
            Decision(storage=storage, action=action) for storage, action in enumerate(actions)
        ),
        budget_bytes=1000,
        policy=f"{swapped} {recomputed}",
        prediction=Prediction(seconds=seconds, peak_bytes=0),
    )


def taking(host: HostTime, *plans: Plan) -> list[tuple[Plan, float]]:
    counts = [[each.action for each in plan.decisions] for plan in plans]
    return [
        (plan, host.of(swapped=done.count(Action.SWAP), recomputed=done.count(Action.RECOMPUTE)))
        for plan, done in zip(plans, counts, strict=True)
    ]


def test_host_time_when_plans_differ_then_found_from_their_steps() -> None:
    found = find_host_time(taking(HOST, moving(10, 0), moving(4, 20), moving(0, 30)))
    assert found is not None
    assert found.step_seconds == pytest.approx(1.0)
    assert found.swap_seconds == pytest.approx(0.1)
    assert found.recompute_seconds == pytest.approx(0.02)


def test_host_time_when_a_policy_only_swaps_then_two_steps_are_enough() -> None:
    found = find_host_time(taking(HOST, moving(10, 0), moving(4, 0)))
    assert found is not None
    assert found.swap_seconds == pytest.approx(0.1)
    assert found.recompute_seconds == 0.0


def test_host_time_when_steps_do_not_tell_then_none() -> None:
    assert find_host_time(taking(HOST, moving(10, 0))) is None
    assert find_host_time(taking(HOST, moving(10, 0), moving(10, 0))) is None
    assert find_host_time(taking(HOST, moving(10, 0), moving(0, 30))) is None


def test_host_time_when_moving_more_took_less_then_never_negative() -> None:
    steps = [(moving(10, 0), 1.0), (moving(4, 20), 1.2), (moving(0, 30), 1.1), (moving(2, 2), 1.3)]
    found = find_host_time(steps)
    assert found is not None
    assert min(found.step_seconds, found.swap_seconds, found.recompute_seconds) >= 0.0


@dataclass
class Plans:
    """Makes three plans, and another one when it knows what the host takes."""

    refined: tuple[Plan, ...]
    hosts: list[HostTime] = field(default_factory=list)

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        if trace.host is None:
            return moving(10, 0), moving(4, 20), moving(0, 30)
        self.hosts.append(trace.host)
        assert count == 1
        assert share == 1 - 0.02
        return self.refined


def search(refined: tuple[Plan, ...], *, is_host_bound: bool = True) -> tuple[Learner, Plans]:
    plans = Plans(refined)
    made = Learner(plans, profile_steps=2, search_steps=4)
    warm_up(made)
    pace(made, 3, is_host_bound=is_host_bound)
    return made, plans


def pace(made: Learner, plans: int, *, is_host_bound: bool = True) -> None:
    """Try plans on a device whose host takes its time."""
    for _ in range(plans * 4):
        instruction = made.begin(SHAPE)
        assert instruction.plan is not None
        assert made.stage is Stage.SEARCH
        [(_, seconds)] = taking(HOST, instruction.plan)
        timing = instruction.timing
        made.end(Outcome(seconds=seconds, timing=timing, is_host_bound=is_host_bound))


def test_search_when_the_host_is_the_limit_then_a_plan_that_minds_it_is_tried_and_followed() -> (
    None
):
    made, plans = search((moving(1, 5),))
    [host] = plans.hosts
    assert host.swap_seconds == pytest.approx(0.1)
    assert run(made, [Outcome(seconds=1.2)] * 2) == ["1 5"] * 2
    assert made.stage is Stage.STABLE
    assert made.replans == 0


def test_search_when_that_plan_is_slower_then_the_best_of_the_others_is_followed() -> None:
    made, _ = search((moving(1, 5),))
    assert run(made, [Outcome(seconds=9.0)] * 2) == ["1 5", "0 30"]


def test_search_when_that_plan_is_made_beside_then_the_best_is_followed_meanwhile() -> None:
    with at_once(value=False):
        made = Learner(Plans((moving(1, 5),)), profile_steps=2, search_steps=4)
        gate = Gated(made.make_plans)
        warm_up(made)  # these plans are made at once
        made.plan_beside(lambda: gate)
        pace(made, 3)
        assert run(made, [Outcome(seconds=1.6)] * 2) == ["0 30"] * 2
        assert made.begin(SHAPE).timing is Timing.HOST
        gate.finish(made)
        assert run(made, [Outcome(seconds=1.6), Outcome(seconds=1.2)]) == ["0 30", "1 5"]


def test_search_when_that_plan_was_tried_or_there_is_none_then_the_best_is_followed() -> None:
    for refined in ((moving(4, 20),), (moving(0, 30),), ()):
        made, plans = search(refined)
        assert len(plans.hosts) == 1
        assert made.begin(SHAPE).plan == moving(0, 30)
        assert made.stage is Stage.STABLE


def test_search_when_the_device_is_the_limit_then_no_plan_minds_the_host() -> None:
    made, plans = search((moving(1, 5),), is_host_bound=False)
    assert made.stage is Stage.STABLE
    assert plans.hosts == []


def test_prediction_when_the_host_takes_longer_then_the_step_takes_that() -> None:
    prediction = Prediction(seconds=1.0, peak_bytes=0)
    assert prediction.step_seconds == 1.0
    assert replace(prediction, host_seconds=1.5).step_seconds == 1.5


def test_best_when_the_host_is_known_then_plans_as_fast_are_compared_with_what_it_takes() -> None:
    trials = [
        Tried(moving(10, 0, seconds=1.0), seconds=2.0, rescues=0),
        Tried(moving(0, 30, seconds=1.1), seconds=1.99, rescues=0),
    ]
    assert find_best(trials).plan.policy == "10 0"
    assert find_best(trials, HOST).plan.policy == "0 30"
