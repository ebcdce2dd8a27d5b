"""The command says what is missing, and shows what broke."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from swapkit import __main__ as command_line
from swapkit.demo.table import show, show_verdict
from tests.unit.demo.test_results import BUDGETED, CAPPED, PLAIN, POOL


def test_demo_when_an_extra_is_missing_then_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert command_line.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "rich and matplotlib" in said
    assert "pip install 'swapkit[demo]'" in said


def test_demo_when_an_option_makes_no_sense_then_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(["demo", "--budget", "200%"])
    assert caught.value.code == 2
    assert "--budget '200%': possible are" in capsys.readouterr().err


def test_table_when_shown_then_has_every_run_and_every_problem() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    results = (PLAIN, POOL, CAPPED, BUDGETED)
    show(console, results, steps=3)
    show_verdict(console, ("e60 broke",))
    shown = console.export_text()
    assert "d60: torch.OutOfMemoryError in step 1" in shown
    assert "BROKEN: e60 broke" in shown
    assert "live in the same RAM" in shown
    for label in ("a", "b", "d60", "e60"):
        assert any(line.startswith(f"{label} ") for line in shown.splitlines())
