"""The time of a step is that of the steps of its kind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.control.steps import KINDS_KEPT, STEPS_TIMED, StepClock, StepTimes
from swapkit.planning.selection.cases import Timing

if TYPE_CHECKING:
    import pytest


def test_median_when_kinds_alternate_then_each_has_its_own() -> None:
    times = StepTimes()
    for short, long in ((1.0, 40.0), (2.0, 50.0), (3.0, 60.0)):
        times.add("short", short)
        times.add("long", long)
    assert times.median("short") == 2.0
    assert times.median("long") == 50.0
    assert times.others("short") == (50.0,)
    assert times.latest("long") == 50.0


def test_latest_when_a_step_waited_for_another_rank_then_the_one_before_counts() -> None:
    times = StepTimes()
    for seconds, latest in ((9.0, 9.0), (1.0, 1.0), (5.0, 1.0), (6.0, 5.0)):
        times.add("same", seconds)
        assert times.latest("same") == latest


def test_median_when_there_was_no_step_then_none_is_known() -> None:
    times = StepTimes()
    assert times.median("any") is None
    assert times.latest("any") == 0.0
    assert times.others("any") == ()


def test_times_when_many_then_only_the_latest_are_kept() -> None:
    times = StepTimes()
    for step in range(STEPS_TIMED + 1):
        times.add("same", float(step == 0))
    assert times.median("same") == 0.0
    assert sum(times._seconds["same"]) == 0.0
    for kind in range(KINDS_KEPT):
        times.add(str(kind), 1.0)
    assert times.median("same") is None
    assert len(times.others("none")) == KINDS_KEPT


def test_step_when_it_did_not_begin_then_it_lasts_from_the_end_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter((100.0, 103.0, 104.0, 105.0, 109.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    assert clock.end().seconds == 3.0
    clock.begin(Timing.HOST)
    assert clock.end().seconds == 1.0
    assert clock.end().seconds == 4.0
