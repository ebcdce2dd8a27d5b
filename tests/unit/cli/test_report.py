"""`swapkit report` draws the page of a record, and refuses with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit import cli
from swapkit.reporting.run_records import write_run
from tests.support.run_records import make_record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write_run(tmp_path / "run.json", make_record())
    return tmp_path / "run.json"


@pytest.mark.parametrize("name", ["run.html", "other.html"])
def test_report_when_given_a_record_then_its_page(
    record: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = record.with_name(name)
    options = [] if name == "run.html" else ["-o", str(page)]
    assert cli.main(["report", str(record), *options]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out == f"{page}: {page.stat().st_size:,} bytes\n"


def test_report_when_there_is_nothing_to_draw_then_status_2_and_why(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record.with_name("other.json")
    other.write_text("{}", encoding="utf-8")
    assert cli.main(["report", str(other)]) == 2
    assert f"swapkit report: {other}: format: expected" in capsys.readouterr().err
    assert cli.main(["report", str(record.with_name("none.json"))]) == 2
    assert cli.main(["report", str(record), "-o", "page.pdf"]) == 2
    assert "'page.pdf': expected a name that ends in .html" in capsys.readouterr().err
