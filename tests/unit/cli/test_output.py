"""Tables are rich on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from swapkit import texts
from swapkit.cli.base import show_table

if TYPE_CHECKING:
    import pytest

ROWS = [("ok", "[a]"), ("problem", "b")]


def show_on_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **environment: str
) -> str:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show_table(("level", "what"), ROWS)
    return capsys.readouterr().out


def test_table_when_there_is_no_terminal_then_plain_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_table(("level", "what"), ROWS)
    assert capsys.readouterr().out == "level    what\nok       [a]\nproblem  b\n"


def test_table_when_on_a_terminal_then_styled_with_all_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    said = show_on_terminal(monkeypatch, capsys)
    assert "\x1b[" in said
    assert "[a]" in said
    assert "─" in said


def test_waiting_when_there_is_no_terminal_then_a_line_says_so_only_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with texts.waiting("planning"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(texts, "PATIENCE_SECONDS", 0.0)
    said = ""
    with texts.waiting("planning"):
        while not said:  # the test's own limit of time ends it if no line appears
            said = capsys.readouterr().err
    assert said == "planning ...\n"
