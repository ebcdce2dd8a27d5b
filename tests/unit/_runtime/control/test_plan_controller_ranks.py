"""A session among ranks: the other one is what a test says in their store."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

import swapkit
from swapkit._runtime.control import plan_maker as plan_making
from swapkit._runtime.control.board import Board
from swapkit._runtime.control.rank_agreement import PATIENCE_STEPS, Ranks, Rounds
from swapkit.errors import PlanMismatch
from swapkit.planning.beside import at_once
from swapkit.planning.planner import find_floor
from tests.support.sessions import (
    Plain,
    Training,
    make_training,
    steady_machine_like,
    train_plainly,
)

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace

SEARCH_STEPS = 2
SETTLING_STEPS = 12  # of a search; slow operators or moves on a busy machine add candidates
PARTS = "parts"
PLACE = f"swapkit/{PARTS}/0"
STEP = "5e"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What this rank and another one share."""
    distributed: Any = torch.distributed
    shared = distributed.HashStore()
    monkeypatch.setattr(plan_making, "measure_machine", steady_machine_like)
    rounds = Rounds(Board(lambda: shared, rank=0, count=2))

    def join(_describe: object, former: Ranks | None = None) -> Ranks:
        return former or Ranks(rounds, PARTS)

    monkeypatch.setattr(plan_making, "join_ranks", join)
    monkeypatch.setattr(plan_making, "describe_step", lambda _: STEP)
    return shared


def publish(store: Any, *figures: Any) -> None:
    """Have the other rank speak."""
    session = [PARTS, PLACE, 0, [*figures, STEP], False]
    store.set("swapkit/sessions/rank-1", json.dumps([session]))


def find_own(store: Any) -> Any:
    """Return the budget and the floor that this rank has published; None: nothing."""
    sessions = json.loads(store.get("swapkit/sessions/rank-0"))
    found = [figures[:2] for _, _, _, figures, _ in sessions if figures is not None]
    return found[0] if found else None


@pytest.fixture(scope="module")
def plain() -> Plain:
    swapkit.install()
    return train_plainly(make_training, 2)


def open_session(training: Training, limit_bytes: int, **options: Any) -> Any:
    return swapkit.budget(
        limit_bytes, training.model, training.optimizer, search_steps=SEARCH_STEPS, **options
    )


def run(session: Any, training: Training, steps: int) -> list[str]:
    """Return the stage after each step."""
    stages = []
    for _ in range(steps):
        training.step()
        stages.append(session.stage)
    return stages


def test_session_when_the_other_rank_is_late_then_warm_up_lasts_and_the_plan_is_for_both(
    store: Any, plain: Plain
) -> None:
    training = make_training()
    limit, other = plain.budget(0.9), plain.budget(0.6)
    with open_session(training, limit) as session:
        assert run(session, training, 5) == ["warmup"] * 5
        budget, floor = find_own(store)
        assert budget == limit
        assert 0 < floor < other
        assert session.trace is None
        publish(store, other, 0)
        assert run(session, training, 1) != ["warmup"]
        assert run(session, training, SETTLING_STEPS)[-1] == "stable"
        assert 0 < session.plan.budget_bytes <= other
        assert session.plan.decisions
        assert session.plan.prediction.peak_bytes <= other


def test_session_when_the_other_rank_has_no_plan_then_this_one_has_none_and_says_why(
    store: Any, plain: Plain
) -> None:
    training = make_training()
    limit = plain.budget(0.9)
    publish(store, limit + 1, limit + 1)
    with open_session(training, limit) as session:
        assert run(session, training, 3) == ["warmup", "stable", "stable"]
        assert session.plan is None
        text = f"rank 1 needs at least {(limit + 1) / 2**20:.2f} MiB ({limit + 1} bytes)"
        assert text in " ".join(session.explain().split())


def test_session_when_the_other_rank_never_comes_then_it_plans_alone(
    store: Any, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    training = make_training()
    with open_session(training, plain.budget(0.7)) as session:
        waited = PATIENCE_STEPS  # the first step is not recorded, the last one ends it
        assert run(session, training, waited) == ["warmup"] * waited
        assert run(session, training, SETTLING_STEPS)[-1] == "stable"
        assert session.plan is not None
        assert find_own(store) is not None
    assert "no budget has arrived from rank 1," in caplog.text


class Plans:
    """A policy of a user's."""

    def plan(self, trace: Trace, machine: Machine) -> Any:
        return swapkit.plan(trace, machine=machine)


def test_policy_when_it_is_a_users_own_then_it_gets_the_budget_and_has_no_floor(
    store: Any, plain: Plain
) -> None:
    training = make_training()
    other = plain.budget(0.6)
    publish(store, other, 0)
    with open_session(training, plain.budget(0.9), policy=Plans()) as session:
        assert run(session, training, 2) == ["warmup", "stable"]
        assert session.plan.budget_bytes <= other
        assert find_own(store)[1] == 0


def test_saved_plan_when_followed_then_nothing_is_asked(
    store: Any, plain: Plain, tmp_path: Path
) -> None:
    training = make_training()
    limit = plain.budget(0.7)
    publish(store, limit, 0)
    path = tmp_path / "plan.json"
    with open_session(training, limit) as session:
        run(session, training, SETTLING_STEPS)
        session.save_plan(path)
    training = make_training()
    with open_session(training, limit, plan=path) as session:
        assert run(session, training, 2) == ["stable", "stable"]
        assert find_own(store) is None
    with pytest.raises(PlanMismatch):
        open_session(training, plain.budget(0.3), plan=path).__enter__()


def test_session_when_the_other_rank_publishes_something_else_then_warned_and_it_plans_alone(
    store: Any, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    training = make_training()
    publish(store, "plenty", 0)
    with open_session(training, plain.budget(0.7)) as session:
        assert run(session, training, 2)[-1] != "warmup"
    assert "rank 1 published b'[[" in caplog.text


@pytest.mark.promise("C12")
def test_floor_when_it_takes_long_then_steps_go_on_unrecorded_until_the_other_rank_is_told(
    store: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, threads = threading.Event(), list[threading.Thread]()

    def find_late(*asked: Any) -> int:
        threads.append(threading.current_thread())
        assert gate.wait(20)
        return find_floor(*asked)

    monkeypatch.setattr(plan_making, "find_floor", find_late)
    training = make_training()
    publish(store, plain.budget(0.9), 0)
    with at_once(value=False), open_session(training, plain.budget(0.9)) as session:
        assert run(session, training, 4) == ["warmup"] * 4
        assert find_own(store) is None
        assert session._active.controller._recording.recorder is None
        gate.set()
        threads[0].join(20)
        run(session, training, 2)
        assert find_own(store)[1] > 0
        assert threads[0] is not threading.current_thread()
        assert len(threads) == 1
