"""The table of decisions: a row for each storage, or fewer where there are very many."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from swapkit.ir.plans import Action
from swapkit.reporting.html import decisions
from swapkit.reporting.html.decisions import DecisionRow, list_rows, render_decisions
from swapkit.reporting.html.views import view_step
from tests.support.run_records import make_record

ROW = DecisionRow(
    place="layers.0.up#0",
    maker="aten.mm",
    action="swap",
    why="far",
    count=1,
    nbytes=4096,
    cost_seconds=0.0,
    copy_seconds=0.002,
    recompute_seconds=None,
)


def count_rows(text: str) -> int:
    return len(re.findall(r"<tr>", text)) - 1


def test_rows_when_made_then_moved_ones_first_and_times_at_the_pace() -> None:
    record = make_record()
    view = view_step(record)
    assert view is not None
    assert record.trace is not None
    assert record.plan is not None
    rows = list_rows(record.trace, view.reasons, 2.0)
    moved = sum(each.action is not Action.KEEP for each in record.plan.decisions)
    assert len(rows) == len(view.reasons)
    assert {each.action for each in rows[:moved]} <= {"swap", "recompute"}
    assert {each.action for each in rows[moved:]} == {"keep"}
    copying = sum(each.copy_seconds for each in view.reasons)
    assert sum(each.copy_seconds for each in rows) == pytest.approx(2 * copying)
    assert rows[0].maker.startswith(("mm", "norm", "attention", "gelu", "add"))


def test_table_when_rendered_then_one_row_each_with_values_to_sort_by() -> None:
    text = render_decisions([ROW, replace(ROW, action="keep", nbytes=5 << 20)])
    assert count_rows(text) == 2
    assert 'data-v="4096"' in text
    assert '<td data-v="0.002">2.00 ms</td>' in text
    assert '<td data-v="-1">-</td>' in text
    assert "storages</button>" not in text
    assert '<th scope="row">layers.0.up#0</th>' in text


def test_table_when_there_are_very_many_then_alike_ones_share_a_row() -> None:
    rows = [
        replace(ROW, place=f"layers.{layer}.{name}#0", nbytes=4096)
        for layer in range(2000)
        for name in ("up", "down", "gate")
    ]
    text = render_decisions(rows)
    assert count_rows(text) == 3
    assert "layers.0-1999.gate#0" in text
    assert "6,000 storages are joined to 3 rows" in text
    assert "storages</button>" in text
    assert "made by" not in text
    others = [replace(row, place=f"part{number}#0") for number, row in enumerate(rows)]
    assert count_rows(render_decisions(others)) == decisions.MOST_ROWS
