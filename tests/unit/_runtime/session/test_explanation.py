"""What a session says of its plan, and of other budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.control.plan_status import PlanStatus
from swapkit._runtime.execution.plan_compiler import pace
from swapkit._runtime.session import reports as explaining
from swapkit._runtime.session.reports import explain
from swapkit.ir.machines import Machine
from swapkit.ir.runs import SessionStats
from swapkit.planning.planner import make_plan
from swapkit.planning.search.solving import TradeOff
from swapkit.simulation.lowering import lower
from tests.support.layers import layered_trace
from tests.support.problems import kept_peak

if TYPE_CHECKING:
    import pytest

STATS = SessionStats(
    budget_bytes=1,
    peak_bytes=0,
    steps=9,
    oom_rescues=0,
    swapped_out_bytes=0,
    swapped_in_bytes=0,
    recomputed_regions=0,
    stall_seconds=0.0,
    host_peak_bytes=0,
    disk_peak_bytes=0,
)


def test_other_budgets_when_steps_take_longer_than_recorded_then_compared_at_the_same_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = layered_trace(4)
    peak_bytes = kept_peak(lower(trace))
    machine = Machine(budget_bytes=peak_bytes, out_bytes_per_second=4e9, in_bytes_per_second=4e9)
    plan = make_plan(trace, machine)
    assert plan.prediction is not None
    same = TradeOff(
        budget_bytes=machine.budget_bytes,
        seconds=plan.prediction.seconds,
        bound_seconds=plan.prediction.seconds,
        peak_bytes=1,
    )
    monkeypatch.setattr(explaining, "trade_offs", lambda *_args, **_named: [same])
    course = PlanStatus(plan=pace(plan, 3.0), trace=trace, machine=machine, pace=3.0)
    row = explain(STATS, course, "auto", []).splitlines()[-1]
    assert "+0.0%" in row or "-0.0%" in row


def test_measured_time_when_steps_are_of_several_kinds_then_others_are_told_apart() -> None:
    course = PlanStatus(step_seconds=0.002, other_step_seconds=(0.5, 0.25))
    lines = explain(STATS, course, "auto", []).splitlines()
    assert lines[-1] == "steps of 2 other kinds, with plans of their own: 500.00 ms, 250.00 ms"


def test_waits_when_copies_were_late_then_the_places_are_named() -> None:
    course = PlanStatus(
        stalls=(("layers.3.mlp, saved tensor 2", 0.25), ("layers.1, saved tensor 0", 0.0104))
    )
    text = explain(STATS, course, "auto", [])
    assert "slowest waits for copies: " in text
    assert "layers.3.mlp, saved tensor 2 (0.250 s), layers.1, saved tensor 0 (0.010 s)" in text
    assert "waited" not in explain(STATS, PlanStatus(), "auto", [])


def test_plans_when_another_was_needed_then_the_reason_is_told() -> None:
    text = explain(STATS, PlanStatus(replans=2, reason="2 steps in a row deviated"), "auto", [])
    assert "replanned 2 times; the last time, 2 steps in a row deviated" in text
    assert "replanned" not in explain(STATS, PlanStatus(), "auto", [])
