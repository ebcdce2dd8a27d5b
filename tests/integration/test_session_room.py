"""Where moves of free memory take long, a session tries plans that leave more memory free."""

from __future__ import annotations

import itertools

import pytest

from swapkit._native.pool import Pool
from swapkit.planning.selection import cases
from tests.support.sessions import make_training, train_both

SHARE, STEPS = 0.8, 16
LEFT_AT_FIRST = 0.97  # of this small budget; the rest is for the ends of a layout, and its gaps

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


@pytest.mark.parametrize("moves", [False, True])
def test_search_when_moves_take_long_then_the_plan_leaves_more_free_and_bits_stay(
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
    share = plan.budget_bytes / log.session.limit_bytes
    assert share < LEFT_AT_FIRST - 0.1 if moves else share == pytest.approx(LEFT_AT_FIRST, abs=0.03)
