"""Records survive their documents, and documents that are not sound are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.errors import DiskError, InvalidArgument, InvalidDocument, InvalidType
from swapkit.reporting.html.page import draw_report, write_report
from swapkit.reporting.paths import check_report, check_trace
from swapkit.reporting.run_records import decode_run, encode_run, read_run, write_run
from tests.support.run_records import make_record

if TYPE_CHECKING:
    from pathlib import Path

RECORD = make_record()
BARE = replace(RECORD, trace=None, plan=None, machine=None, trade_offs=(), steps=(), notes=())


def document(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(encode_run(RECORD)))
    return content | changes


@pytest.mark.parametrize("record", [RECORD, BARE])
def test_record_when_written_and_read_then_the_same(tmp_path: Path, record: Any) -> None:
    write_run(tmp_path / "run.json", record)
    assert read_run(tmp_path / "run.json") == record


def test_document_when_written_then_the_fields_of_version_1() -> None:
    """Another field needs another version: programs of this one refuse it."""
    content = document()
    assert content["version"] == 1
    assert set(content) == {
        "format", "version", "created", "swapkit_version", "torch_version", "device", "hardware",
        "policy", "stage", "is_ended", "pace", "plan_text", "why_no_plan", "notes", "stats",
        "steps", "trade_offs", "machine", "plan", "trace",
    }  # fmt: skip
    assert set(content["stats"]) == {
        "budget_bytes", "peak_bytes", "steps", "oom_rescues", "swapped_out_bytes",
        "swapped_in_bytes", "recomputed_regions", "stall_seconds", "host_peak_bytes",
        "disk_peak_bytes", "replans", "step_seconds", "predicted_step_seconds",
        "predicted_peak_bytes", "predicted_reserved_bytes", "bound_step_seconds",
        "unlimited_step_seconds",
    }  # fmt: skip
    assert content["steps"]["fields"] == [
        "step", "stage", "seconds", "peak_bytes", "rescues", "swapped_out_bytes",
        "swapped_in_bytes", "stall_seconds",
    ]  # fmt: skip
    assert content["trade_offs"]["fields"] == [
        "budget_bytes", "seconds", "bound_seconds", "peak_bytes", "swapped_bytes",
        "recompute_seconds", "host_peak_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"format": "swapkit plan"}, "format: expected 'swapkit run'"),
        ({"version": 2}, "version: expected 1"),
        ({"device": 3}, "device: expected text"),
        ({"pace": 0}, "pace: expected a number"),
        ({"is_ended": "no"}, "is_ended: expected true or false"),
        ({"notes": "one"}, "notes: expected a list of texts"),
        ({"more": 1}, "document: expected only"),
        ({"stats": {}}, "stats: 'budget_bytes' is missing"),
        ({"steps": {"fields": [], "rows": []}}, "steps.fields: expected 'step'"),
        ({"plan": {}}, "plan.format: expected 'swapkit plan'"),
    ],
)
def test_document_when_not_sound_then_refused_with_the_place(
    changes: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidDocument) as caught:
        decode_run(document(**changes))
    assert str(caught.value).startswith(where)


def test_document_when_a_value_in_a_table_is_wrong_then_refused_with_the_row() -> None:
    content = document()
    content["steps"]["rows"][3][2] = -1.0
    with pytest.raises(InvalidDocument, match=r"^steps\[3\]\.seconds: expected a number of at"):
        decode_run(content)
    content["steps"]["rows"][3] = []
    with pytest.raises(InvalidDocument, match=r"^steps\[3\]: expected a list of 8 values"):
        decode_run(content)


def test_document_when_its_plan_is_of_another_trace_then_refused() -> None:
    content = document()
    content["plan"]["decisions"]["rows"][0][0] = 1 << 20
    with pytest.raises(InvalidDocument, match=r"^plan\."):
        decode_run(content)


def test_document_when_it_is_something_else_then_said_what_writes_one() -> None:
    with pytest.raises(InvalidDocument, match=r"session.report\('run.json'\)"):
        decode_run([1])


def test_report_when_its_name_ends_in_json_then_drawn_later(tmp_path: Path) -> None:
    write_report(tmp_path / "run.json", RECORD)
    draw_report(tmp_path / "run.json", tmp_path / "later.html")
    write_report(tmp_path / "now.HTML", RECORD)
    later = (tmp_path / "later.html").read_text(encoding="utf-8")
    assert later.startswith("<!DOCTYPE html>")
    assert len(later) == len((tmp_path / "now.HTML").read_text(encoding="utf-8"))


def test_report_when_the_name_is_wrong_then_said_what_is_possible(tmp_path: Path) -> None:
    for name in ("run.pdf", "run", "", ".html"):
        with pytest.raises(InvalidArgument, match=r"\.html, .*\.json"):
            check_report(name)
    for name in ("trace", "trace.txt", "trace.json.zip", "memory.pickle", ""):
        with pytest.raises(InvalidArgument, match=r"\.json, .*\.json\.gz"):
            check_trace(name)
    with pytest.raises(InvalidType):
        check_report(None)
    with pytest.raises(InvalidArgument, match=r"ends in \.html"):
        draw_report(tmp_path / "run.json", tmp_path / "other.json")
    with pytest.raises(DiskError, match="does not exist"):
        write_report(tmp_path / "no" / "run.html", RECORD)
