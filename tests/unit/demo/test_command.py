"""The command says what is missing, and shows what broke."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from swapkit import cli as command_line
from swapkit.demo.progress import show_progress
from swapkit.demo.table import show_race
from tests.unit.demo.test_results import LABELS, RACE, TRIAL

if TYPE_CHECKING:
    import pytest

    from swapkit.demo.results import RaceResult


def test_demo_when_an_extra_is_missing_then_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert command_line.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "needs matplotlib" in said
    assert "pip install 'swapkit[demo]'" in said


def test_demo_when_an_option_makes_no_sense_then_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["demo", "--budget", "200%"]) == 2
    assert "--budget '200%': expected a share" in capsys.readouterr().err


def shown(race: RaceResult, problems: tuple[str, ...] = ()) -> list[str]:
    console = Console(width=110, record=True, file=io.StringIO())
    show_race(console, race, problems)
    return console.export_text().strip().splitlines()


def test_result_when_shown_then_the_sentence_that_matters_is_first() -> None:
    lines = shown(RACE)
    assert lines[0].startswith("swapkit trains within 60% of the memory")
    for label in (*LABELS.values(), TRIAL.label):
        assert any(line.startswith(f"{label} ") for line in lines), label
    assert "    torch.OutOfMemoryError: no room" in lines


def test_result_when_something_broke_then_that_is_first() -> None:
    lines = shown(RACE, ("swapkit at 60% broke",))
    assert lines[0] == "BROKEN: swapkit at 60% broke"
    assert not any("swapkit trains within" in line for line in lines)


def test_progress_when_there_is_no_terminal_then_lines_and_nothing_else() -> None:
    file = io.StringIO()
    with show_progress(Console(file=file, width=40), total=3) as progress:
        progress.now("plain: step 1")
        progress.done(1)
        progress.say("plain: 14 steps, peak 262.38 MiB, 370 ms a step")
    assert file.getvalue() == "plain: 14 steps, peak 262.38 MiB, 370 ms a step\n"
