"""Traces and plans print in one line, whatever they hold."""

from __future__ import annotations

from swapkit.ir.plans import Plan
from tests.unit.ir.values import PLAN, TRACE


def test_trace_when_printed_then_one_line_of_counts() -> None:
    assert repr(TRACE) == (
        "<Trace Bündel: 5 operators, 4 storages, 5 events, 4.5 s, peak 1.76 KiB>"
    )


def test_plan_when_printed_then_one_line_of_actions_and_its_prediction() -> None:
    text = repr(PLAN)
    assert text.startswith(f"<Plan {PLAN.policy}: ")
    assert "\n" not in text
    assert len(text) < 160
    assert repr(Plan(decisions=(), budget_bytes=1 << 30)) == (
        "<Plan of the user: keep all; budget 1.00 GiB; not simulated>"
    )
