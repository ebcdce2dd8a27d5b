"""A session's repeated step lies at planned addresses: what is reserved is what is in use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._native.layout import LivesMode
from swapkit._runtime.allocators.pool_layout import IDLE_STEPS
from swapkit.testing import planning_at_once
from tests.support.sessions import Training, make_training, train_plainly

if TYPE_CHECKING:
    from swapkit._native.layout import LayoutStats
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.session.session import Session

pytestmark = [
    pytest.mark.usefixtures("steady_machine"),
    pytest.mark.promise("E3"),
]

ATTEMPTS = 8
STEPS = 40  # enough for a plan to settle, and for its addresses


def layout_of(installation: Installation) -> LayoutStats:
    assert installation.layout is not None
    return installation.layout.stats()


def train_to_layout(training: Training, session: Session, installation: Installation) -> None:
    """Train until steps lie as planned."""
    for _ in range(STEPS):
        training.step()
        if session.stage == "stable" and layout_of(installation).hit_bytes:
            return
    raise AssertionError(session.explain())


def lies_as_planned(training: Training, installation: Installation) -> bool:
    """Train a step; return whether all of it lay in the layout's memory, where that was already.

    After enough such steps other memory goes back: see `PoolLayout._watch`.
    """
    before, maps = layout_of(installation), installation.pool.stats()["maps"]
    training.step()
    after = layout_of(installation)
    lies = after.served_bytes - before.served_bytes == after.hit_bytes - before.hit_bytes > 0
    return lies and installation.pool.stats()["maps"] == maps


def train_in_layout(training: Training, installation: Installation) -> bool:
    """Train until steps in a row lie as planned, so many that other memory went back.

    Return whether there were so many. On a busy machine some copies begin or end elsewhere than in
    the step that the layout was made from, and such a step needs other memory.
    """
    in_turn = (
        all(lies_as_planned(training, installation) for _ in range(IDLE_STEPS + 1))
        for _ in range(STEPS)
    )
    return any(in_turn)


@pytest.mark.parametrize("share", [0.7, pytest.param(0.9, marks=pytest.mark.slow), 2.0])
def test_session_when_stable_then_steps_lie_as_planned_with_the_same_bits(
    share: float, installation: Installation
) -> None:
    plain = train_plainly(make_training, 2)
    assert any(holds_layout(plain.budget(share), installation) for _ in range(ATTEMPTS)), (
        "no layout held"
    )


def holds_layout(limit_bytes: int, installation: Installation) -> bool:
    """Check steps that lie as planned, and the bits of all steps; return whether steps did."""
    training, pool = make_training(), installation.pool
    with swapkit.budget(limit_bytes, training.model, training.optimizer) as session:
        train_to_layout(training, session, installation)
        holds = train_in_layout(training, installation)
        pool.reset_peak()
        maps = pool.stats()["maps"]
        holds &= all(lies_as_planned(training, installation) for _ in range(IDLE_STEPS))
        if holds:
            figures = pool.stats()
            assert figures["maps"] == maps
            assert figures["reserved_bytes.all.peak"] <= 1.05 * figures["allocated_bytes.all.peak"]
            assert "% of the bytes lie there" in session.explain()
    assert layout_of(installation).height_bytes == 0
    assert training.outcome() == train_plainly(make_training, training.steps_done).outcome
    return holds


@pytest.mark.promise("F2")
@pytest.mark.parametrize(
    "share", [0.45, 0.75, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.6, 0.85))]
)
def test_session_when_steps_lie_as_planned_then_they_reserve_what_was_predicted(
    share: float, installation: Installation
) -> None:
    plain = train_plainly(make_training, 2)
    assert any(reserves_as_predicted(plain.budget(share), installation) for _ in range(ATTEMPTS)), (
        "no step lay as planned and reserved what was predicted"
    )


def reserves_as_predicted(limit_bytes: int, installation: Installation) -> bool:
    """Check what a step reserves if all of it lies as planned; return whether it is within 1 %."""
    training = make_training()
    with (
        planning_at_once(),
        swapkit.budget(limit_bytes, training.model, training.optimizer) as session,
    ):
        train_to_layout(training, session, installation)
        is_settled = train_in_layout(training, installation)
        installation.pool.reset_peak()
        if not lies_as_planned(training, installation) or not is_settled:
            return False
        predicted = session.stats.predicted_reserved_bytes
        measured = installation.pool.stats()["reserved_bytes.all.peak"]
        assert predicted is not None
        assert session.trace is not None
        # On a busy machine a copy ends, or begins, one storage away from where it was predicted.
        moved = max(storage.nbytes for storage in session.trace.storages if storage.is_saved)
        assert abs(measured - predicted) <= 0.01 * predicted + moved
        assert max(measured, predicted) <= session.limit_bytes
        assert "reserved at planned addresses" in session.explain()
    return abs(measured - predicted) <= 0.01 * predicted


@pytest.mark.parametrize("is_moving", [True, False])
def test_session_when_a_step_that_moves_to_planned_addresses_needs_a_rescue_then_the_plan_stays(
    monkeypatch: pytest.MonkeyPatch, installation: Installation, *, is_moving: bool
) -> None:
    plain = train_plainly(make_training, 2)
    training = make_training()
    limit = plain.budget(0.6)
    with (
        planning_at_once(),
        swapkit.budget(limit, training.model, training.optimizer) as session,
    ):
        train_to_layout(training, session, installation)
        rescues, replans = session.stats.oom_rescues, session.stats.replans
        monkeypatch.setattr(type(installation.layout), "is_moving", is_moving)
        for _ in range(3):
            in_use = torch.empty(limit // 8, dtype=torch.uint8)
            training.step()
            del in_use
        assert session.stats.oom_rescues > rescues
        assert (session.stats.replans == replans) is is_moving


def test_session_when_other_work_runs_between_steps_then_the_layout_holds(
    installation: Installation,
) -> None:
    plain = train_plainly(make_training, 2)
    training = make_training()
    with swapkit.budget(plain.budget(0.9), training.model, training.optimizer) as session:
        train_to_layout(training, session, installation)
        state = torch.get_rng_state()
        for _ in range(3 * IDLE_STEPS):
            with torch.no_grad():
                training.model.eval()
                training.forward()
                training.model.train()
            torch.set_rng_state(state)
            training.step()
            state = torch.get_rng_state()
        stats = layout_of(installation)
        assert stats.height_bytes > 0
        assert stats.hit_bytes > 0.6 * (stats.hit_bytes + stats.missed_bytes)
    assert training.outcome() == train_plainly(make_training, training.steps_done).outcome


def test_sessions_when_nested_then_the_last_to_close_ends_the_layout(
    installation: Installation,
) -> None:
    training = make_training()
    with swapkit.budget("1GiB") as outer:
        with swapkit.budget("512MiB", training.model, training.optimizer):
            training.step()
        assert installation.layout is not None
        assert list(installation.layout._users)
        outer.close()
    assert not installation.layout._users


@pytest.mark.promise("E5")
@pytest.mark.parametrize("way", ["variable", "flag", "neither"])
def test_session_when_fragmentation_is_asked_for_then_lives_are_separate(
    way: str, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_FRAGMENTATION", "1" if way == "variable" else "0")
    training = make_training()
    parser = swapkit.add_arguments(argparse.ArgumentParser())
    flags = parser.parse_args(["--memory-fragmentation"] if way == "flag" else [])
    settings = swapkit.from_arguments(flags)
    with settings.budget(training.model, training.optimizer, limit="1GiB", policy="rescue"):
        assert installation.layout is not None
        modes = set(installation.layout._users.values())
        assert modes == {LivesMode.NOTED if way == "neither" else LivesMode.SEPARATE}
        training.step()
