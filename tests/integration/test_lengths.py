"""Sequences of another length in each step: one plan for all, and one more for what recurs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import swapkit
from swapkit._runtime.recording.recorder import Recorder
from swapkit.planning.selection.cases import AHEAD
from tests.support.sessions import TOKENS, Training, make_training, train, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sessions import Log

STEPS = 20
UNPLANNED = 5  # the first ones: four under rescue, one recorded
SHARE = 0.6
LEAST = TOKENS // 2
SHORTER = 7 * TOKENS // 16  # than any that `scatter` leaves with a norm's statistics to be moved

pytestmark = [pytest.mark.promise("C12"), pytest.mark.usefixtures("installation", "steady_machine")]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each recording."""
    found: list[int] = []
    begin = Recorder.begin

    def note(recorder: Recorder) -> None:
        found.append(1)
        begin(recorder)

    monkeypatch.setattr(Recorder, "begin", note)
    return found


def follow(before: Callable[[Training, int], object], steps: int = STEPS) -> tuple[Log, list[Any]]:
    """Train with and without a budget, to the same bits; return what came of each step's plan."""
    plain = train_plainly(make_training, steps, before)
    training = make_training()
    reports: list[Any] = []
    with swapkit.budget(plain.budget(SHARE), training.model, training.optimizer) as session:
        assert session._active is not None
        learner = session._active.controller._learner  # type: ignore[union-attr]
        end = learner.end

        def note(outcome: Any) -> None:
            reports.append((learner.is_general, outcome.deviation))
            end(outcome)

        learner.end = note  # type: ignore[method-assign]
        log = train(session, training, steps, before)
        del learner.end
    assert training.outcome() == plain.outcome
    return log, reports


def scatter(training: Training, step: int) -> None:
    training.tokens = TOKENS - 97 * (step + 3) % LEAST


def test_lengths_when_each_comes_once_then_one_recording_serves_all_to_the_last_event(
    recorded: list[int],
) -> None:
    log, reports = follow(scatter)
    assert reports[UNPLANNED:] == [(True, "")] * (STEPS - UNPLANNED)
    assert len(recorded) == 1
    assert log.rescues_since(STEPS - 5) == 0
    assert log.session.stats.swapped_out_bytes > 0


def test_lengths_when_they_grow_then_planned_anew_for_longer_ones_without_a_recording(
    recorded: list[int],
) -> None:
    def before(training: Training, step: int) -> None:
        training.tokens = LEAST + 11 * step

    log, reports = follow(before)
    assert reports[UNPLANNED:] == [(True, "")] * (STEPS - UNPLANNED)
    assert len(recorded) == 1
    growth = (LEAST + 11 * STEPS) / (LEAST + 11 * UNPLANNED)
    assert "the last time, inputs became longer" in log.session.explain()
    assert 1 <= log.replans[-1] <= growth / AHEAD + 3


@pytest.mark.parametrize("is_recorded_short", [True, False])
def test_lengths_when_some_storages_are_too_small_to_be_moved_at_some_then_followed_to_the_end(
    *, is_recorded_short: bool
) -> None:
    def before(training: Training, step: int) -> None:
        scatter(training, step)
        if (step % 2 == 0) == is_recorded_short:  # the fifth step is the one that is recorded
            training.tokens -= SHORTER

    log, reports = follow(before)
    assert reports[UNPLANNED:] == [(True, "")] * (STEPS - UNPLANNED)
    assert log.session.stats.swapped_out_bytes > 0


def test_length_when_it_recurs_then_recorded_for_a_plan_of_its_own(recorded: list[int]) -> None:
    def before(training: Training, step: int) -> None:
        scatter(training, step)
        if step > 8:
            training.tokens = TOKENS

    log, reports = follow(before)
    assert [is_general for is_general, _ in reports].count(True) < STEPS - UNPLANNED
    assert len(recorded) == 2
    assert log.stages[-1] == "stable"
    assert reports[-1] == (False, "")
