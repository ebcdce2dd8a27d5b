"""The card of a session in a notebook."""

from __future__ import annotations

from dataclasses import replace

from swapkit.reporting.html.card import render_card, render_new
from tests.support.run_records import make_record, make_steps

STATS = make_record().stats


def test_card_when_rendered_then_stage_peak_plan_and_steps() -> None:
    stats = replace(STATS, budget_bytes=200 << 20, peak_bytes=50 << 20, steps=1)
    text = render_card(stats, "stable", "<3 storages swapped>", make_steps(2, 200 << 20))
    assert "stable, 1 step" in text
    assert "peak 50.00 MiB of 200.00 MiB (25%)" in text
    assert 'value="0.250"' in text
    assert "&lt;3 storages swapped&gt;" in text
    assert text.count("<tr>") == 3
    assert "script" not in text


def test_card_when_there_is_no_plan_and_no_step_then_said() -> None:
    text = render_card(STATS, "warmup", "", ())
    assert "plan: none" in text
    assert "<table" not in text


def test_card_when_not_entered_then_the_budget() -> None:
    assert "budget 1.00 GiB, not entered" in render_new(1 << 30)
