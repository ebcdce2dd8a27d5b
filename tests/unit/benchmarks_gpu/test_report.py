"""Tables, checks and flat figures of the GPU suite."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu.report import (
    BROKEN,
    MET,
    MISSED,
    NOT_MEASURED,
    Check,
    Report,
    format_report,
    format_table,
    head_of,
    ratio_of,
    read_report,
    show,
    slug,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_report(path: Path | None = None) -> Report:
    report = Report(part="link", path=path)
    report.row("copies", "out_1MiB", {"engine_gb_per_s": 50.0, "ratio": 0.96})
    report.row("copies", "out_8MiB", {"engine_gb_per_s": None, "ratio": None})
    report.check(Check(name="out_1MiB", text="out 1 MiB", value=0.96, at_least=0.95))
    report.note("one note")
    return report


@pytest.mark.parametrize(
    ("value", "promise", "verdict"),
    [
        (0.98, False, MET),
        (1.02, True, MET),
        (0.97, False, MISSED),
        (1.03, False, MISSED),
        (1.03, True, BROKEN),
        (None, True, NOT_MEASURED),
    ],
)
def test_check_when_value_is_compared_then_verdict(
    value: float | None, promise: bool, verdict: str
) -> None:
    check = Check(name="x", text="x", value=value, at_least=0.98, at_most=1.02, promise=promise)
    assert check.verdict == verdict
    assert check.bounds == "at least 0.98, at most 1.02"


@pytest.mark.parametrize(
    ("key", "value", "shown", "head"),
    [
        ("peak_bytes", 3 << 20, "3.0", "peak, MiB"),
        ("step_ms", 1234.5, "1,234.50", "step, ms"),
        ("step_ratio", 1.0, "1.000", "step ratio"),
        ("ratio", 0.5, "0.500", "ratio"),
        ("engine_gb_per_s", 51.234, "51.23", "engine, GB/s"),
        ("rescues", 12, "12", "rescues"),
        ("outcome", "finished", "finished", "outcome"),
        ("step_ms", None, "-", "step, ms"),
    ],
)
def test_figure_when_shown_then_its_key_says_how(
    key: str, value: float | str | None, shown: str, head: str
) -> None:
    assert show(key, value) == shown
    assert head_of(key) == head


def test_text_when_long_then_cut_in_the_table_only() -> None:
    text = "failed: " + "x" * 200
    assert len(show("outcome", text)) == 60
    report = Report(part="train")
    report.row("t", "plain", {"outcome": text})
    assert report.flat() == {"train_plain_outcome": text}


def test_table_when_rows_have_different_figures_then_columns_are_aligned() -> None:
    text = format_table("t", {"a": {"x_ms": 1.0}, "longer": {"y_ns": 2000.0, "x_ms": 10.0}})
    assert text.splitlines() == [
        "t",
        "        x, ms  y, ns",
        "a        1.00      -",
        "longer  10.00  2,000",
    ]


def test_flat_when_made_then_every_figure_and_verdict_has_a_key() -> None:
    assert make_report().flat() == {
        "link_out_1MiB_engine_gb_per_s": 50.0,
        "link_out_1MiB_ratio": 0.96,
        "link_out_8MiB_engine_gb_per_s": None,
        "link_out_8MiB_ratio": None,
        "link_check_out_1MiB": MET,
    }


def test_row_when_put_again_then_takes_the_place() -> None:
    report = make_report()
    report.row("copies", "out_1MiB", {"ratio": 0.5})
    assert report.tables["copies"]["out_1MiB"] == {"ratio": 0.5}
    assert list(report.tables["copies"]) == ["out_1MiB", "out_8MiB"]


def test_report_when_written_after_each_change_then_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "part-link.json"
    written = make_report(path)
    read = read_report(path)
    assert read.flat() == written.flat()
    assert format_report(read) == format_report(written)
    assert "one note" in format_report(read)
    assert not list(tmp_path.glob("*.tmp"))


def test_report_when_file_holds_something_else_then_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"part": "link"}), encoding="utf-8")
    with pytest.raises(ValueError, match="holds no report"):
        read_report(path)


def test_ratio_when_something_is_missing_then_none() -> None:
    assert ratio_of(3.0, 2) == 1.5
    assert ratio_of(None, 2.0) is None
    assert ratio_of(1.0, None) is None
    assert ratio_of(1.0, 0.0) is None
    assert ratio_of("x", 1.0) is None


def test_slug_when_made_then_only_letters_digits_and_underscores() -> None:
    assert slug("compile_0.5 at 8-bit!") == "compile_0_5_at_8_bit"
