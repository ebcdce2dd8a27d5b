"""Moves of free memory end with planned addresses, so plans on trial are not judged by them."""

from __future__ import annotations

import itertools

import pytest

from swapkit._native.pool import Pool
from swapkit.planning.selection import cases
from tests.support.sessions import make_training, train_both

SHARE, STEPS = 0.8, 16
LEFT = 0.97  # of this small budget; the rest is for the ends of a layout, and its gaps

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


@pytest.mark.parametrize("moves", [False, True])
def test_search_when_moves_take_long_then_the_plan_uses_the_budget_all_the_same(
    moves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = range(1000, 0, -1) if moves else itertools.repeat(0)  # each moves less than the last
    moved = itertools.accumulate(map(float, steps))
    monkeypatch.setattr(Pool, "moving_seconds", lambda _pool: next(moved))
    monkeypatch.setattr(cases, "FASTER", 0.01)  # no step counts as faster than another
    log = train_both(make_training, SHARE, STEPS)
    assert log.stages[-1] == "stable"
    plan = log.session.plan
    assert plan is not None
    assert plan.budget_bytes / log.session.limit_bytes == pytest.approx(LEFT, abs=0.03)
