"""Stages of a pipeline that take less memory; here ranks are objects of one process."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import torch.distributed

from swapkit._runtime.control import stages
from swapkit._runtime.control.board import Board
from swapkit._runtime.control.stages import MOST_STEPS, StagePlans
from swapkit.ir.plans import Plan, Prediction
from swapkit.ir.traces import WAIT, Operator, Phase, StagePlace, Trace
from swapkit.planning.selection.cases import RECURRENCES, Outcome
from swapkit.planning.selection.lean_trials import SETTLING, STEPS
from swapkit.planning.selection.learner import TIMED_STEPS, Learner
from tests.support.learning import LEAN, LeanPlans

if TYPE_CHECKING:
    import pytest


distributed: Any = torch.distributed
MIB = 1 << 20
STEP = 20.0  # of the recorded step of every stage
OWN = "own"
TRIALS = 2 * (SETTLING + STEPS)
HEARD = 12  # steps until all ranks know each other's times, and have planned


def plan_of(name: str, seconds: float, peak_bytes: int) -> Plan:
    prediction = Prediction(seconds=seconds, peak_bytes=peak_bytes)
    return Plan(decisions=(), budget_bytes=peak_bytes, policy=name, prediction=prediction)


class Stage:
    """A rank with a session: the work of its recorded step, and what its own plan adds to it."""

    def __init__(
        self,
        work: float,
        added: float = 0.0,
        *,
        place: StagePlace | None,
        can_lean: bool = True,
        searches: int = 1,
    ) -> None:
        operators = tuple(
            Operator(name=name, seconds=seconds, phase=Phase.FORWARD)
            for name, seconds in (("mm", work), (WAIT, STEP - work))
        )
        self.trace = Trace(operators=operators, storages=(), place=place)
        self.added = added
        self.lean_plans = LeanPlans(8 * MIB)
        self.plans = StagePlans(self.lean_plans if can_lean else None)
        self.learner = Learner(self.make, profile_steps=1, search_steps=searches)
        self.seconds = STEP + added

    def make(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        assert trace is self.trace
        seconds = STEP + self.added
        others = (plan_of(f"other {at}", 2 * seconds, 9 * MIB) for at in range(count - 1))
        return (plan_of(OWN, seconds, int(12 * MIB * share)), *others)

    def step(self, signature: str = "shape") -> str:
        """Train a step; return which plan it followed."""
        instruction = self.learner.begin(signature)
        is_recorded = instruction.mode.value == "record"
        self.learner.end(Outcome(seconds=self.seconds, trace=self.trace if is_recorded else None))
        self.plans.end_step(self.learner)
        exchange = self.plans._exchange
        if exchange is not None and exchange._answer is not None:
            wait([exchange._answer], 20)
        return instruction.plan.policy if instruction.plan else instruction.mode.value

    def describe(self) -> str:
        return self.plans.describe(self.learner.case)


class World:
    """The ranks of a pipeline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.places = [StagePlace((at,), count, tuple(range(count))) for at in range(count)]
        self.stages: list[Stage] = []
        self._now = 0
        self.restart()
        monkeypatch.setattr(stages, "find_board", lambda: self._boards[self._now])

    def restart(self) -> None:
        """Have a new default process group."""
        store = distributed.HashStore()
        count = len(self.places)
        self._boards = [Board(lambda: store, rank=at, count=count) for at in range(count)]

    def run(self, steps: int = HEARD) -> list[str]:
        """Run steps of all stages; return which plans the last ones followed."""
        for _ in range(steps):
            found = []
            for at, stage in enumerate(self.stages):
                self._now = at
                found.append(stage.step())
        return found


def start(
    monkeypatch: pytest.MonkeyPatch, works: list[float], added: list[float] | None = None
) -> World:
    world = World(monkeypatch, len(works))
    pairs = zip(works, added or [0.0] * len(works), world.places, strict=True)
    world.stages = [Stage(work, more, place=place) for work, more, place in pairs]
    return world


def asked(world: World) -> list[list[float]]:
    return [[round(each, 6) for each in stage.lean_plans.asked] for stage in world.stages]


def test_stages_when_one_is_slowest_then_each_other_asks_for_a_plan_that_is_no_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0, 10.0, 5.0], added=[4.0, 0.0, 1.0])
    world.run()
    # The slowest works for 14 s; the others wait for 10 s and 15 s of their recorded steps.
    assert asked(world) == [[], [14.0 + 10.0], [14.0 + 15.0]]
    assert world.run(TRIALS + 1) == [OWN, LEAN, LEAN]


def test_stages_when_all_take_as_long_then_the_first_is_the_slowest_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0] * 4)
    world.run()
    assert asked(world) == [[], [STEP], [STEP], [STEP]]


def test_stages_when_the_lean_plan_turns_out_slower_then_it_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0, 5.0])
    world.run()
    second = world.stages[1]
    for _ in range(2 * TRIALS):
        case = second.learner.case
        assert case is not None
        is_lean = case.plan is not None and case.plan.policy == LEAN
        second.seconds = 1.2 * STEP if is_lean else STEP
        world.run(1)
    assert world.run(1) == [OWN, OWN]


def test_stages_when_one_has_no_session_then_all_follow_their_own_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0, 5.0, 5.0])
    world.stages.pop()
    assert world.run(3 * HEARD) == [OWN, OWN]
    assert asked(world) == [[], []]
    assert [stage.describe() for stage in world.stages] == ["", ""]


def test_stages_when_one_ends_its_session_then_the_others_keep_their_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [5.0, 10.0])
    world.run(HEARD + TRIALS)
    world.stages.pop().plans.leave()
    assert world.run(2 * MOST_STEPS) == [LEAN]


def test_stages_when_another_becomes_the_slowest_then_it_is_back_to_its_own_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [12.0, 10.0])
    assert world.run(HEARD + TRIALS) == [OWN, LEAN]
    first = world.stages[0]
    first.added = -6.0  # a plan of another search
    for _ in range(RECURRENCES):
        first.learner.begin("shape")
        first.learner.end(Outcome(seconds=STEP, rescues=1))
    assert world.run(2 * MOST_STEPS + TRIALS) == [LEAN, OWN]
    assert asked(world) == [[10.0 + 8.0], [12.0 + 10.0]]


def test_stages_when_their_steps_are_of_two_kinds_then_no_plan_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0, 5.0])
    for at, stage in enumerate(world.stages):
        world._now = at
        for signature in ("shape", "shape", "other"):
            stage.step(signature)
    world.run(3 * HEARD)
    assert asked(world) == [[], []]


def test_stages_when_a_policy_is_the_user_s_then_it_counts_and_its_plan_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 3)
    world.stages = [
        Stage(work, place=place, can_lean=at > 0)
        for at, (work, place) in enumerate(zip([5.0, 15.0, 10.0], world.places, strict=True))
    ]
    world.run()
    assert asked(world) == [[], [], [15.0 + 10.0]]


def test_session_when_it_is_no_stage_then_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_board() -> None:
        raise AssertionError

    monkeypatch.setattr(stages, "find_board", find_board)
    for place in (None, StagePlace((0,), 1, (0,)), StagePlace((0,), 2, ())):
        stage = Stage(10.0, place=place)
        assert [stage.step() for _ in range(4)] == ["record", OWN, OWN, OWN]
        assert stage.describe() == ""
        stage.plans.leave()


def test_stages_when_the_process_group_is_new_then_they_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0, 5.0])
    world.run()
    former = [stage.plans._exchange for stage in world.stages]
    world.restart()
    world.run(1)
    assert all(each is not None and each._is_over for each in former)
    assert world.run(HEARD + TRIALS) == [OWN, LEAN]


def test_text_when_plans_are_chosen_then_it_names_the_slowest_stage_and_both_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = start(monkeypatch, [10.0, 5.0], added=[5.0, 0.0])
    world.run(1)
    assert [stage.describe() for stage in world.stages] == ["", ""]
    world.run(HEARD + TRIALS)
    first, second = (stage.describe() for stage in world.stages)
    assert first == "stage 0 of 2: the pipeline's step takes 25.000 s (this one)"
    assert second == (
        "stage 1 of 2: the pipeline's step takes 25.000 s (stage 0); this stage's plan takes "
        "8.00 MiB instead of 11.76 MiB for it"
    )


def test_text_when_steps_take_longer_than_predicted_then_it_says_what_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2)
    works = zip([10.0, 5.0], world.places, strict=True)
    world.stages = [Stage(work, place=place, searches=2) for work, place in works]
    for factor, steps in ((1.5, 6), (2.0, 2 * MOST_STEPS)):  # the last ones are in the majority
        for stage in world.stages:
            stage.seconds = factor * STEP
        world.run(steps)
    assert "the pipeline's step takes 40.000 s (stage 0)" in world.stages[1].describe()


def test_text_when_ranks_have_several_stages_then_it_names_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2)
    world.places = [StagePlace(own, 6, (0, 1)) for own in ((0, 2, 4), (1, 3, 5))]
    world.stages = [
        Stage(work, place=place) for work, place in zip([10.0, 5.0], world.places, strict=True)
    ]
    world.run()
    text = world.stages[1].describe()
    assert text.startswith("stages 1, 3 and 5 of 6: the pipeline's step takes ")
    assert text.endswith("(stages 0, 2 and 4)")


def test_times_when_the_own_plan_has_been_timed_in_one_step_only_then_nobody_hears_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2)
    world.stages = [Stage(18.0, place=each, searches=2) for each in world.places]
    assert world.run(1 + 2 + TIMED_STEPS - 1) == [OWN, OWN]  # recorded, tried, followed
    assert [each.plans._own for each in world.stages] == [None, None]
    world.run(2)
    assert all(each.plans._own is not None for each in world.stages)
