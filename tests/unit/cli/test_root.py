"""The command line says what there is, ends with documented codes, and shows no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit import cli
from swapkit.cli.base import BAD_INPUT, FAILED, code_of
from swapkit.cli.root import root
from swapkit.errors import (
    BackendError,
    DiskError,
    InfeasibleBudget,
    InvalidArgument,
    NativeBuildError,
    OverBudget,
    PlanMismatch,
    SwapkitError,
    Unsupported,
)
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version_when_asked_for_then_printed(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([option]) == 0
    assert capsys.readouterr().out == f"swapkit {swapkit.__version__}\n"


def test_help_when_asked_for_then_every_command_has_a_line_and_codes_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in root.commands:
        assert f"\n  {name} " in said
    assert "\n    130  interrupted (Ctrl-C)\n" in said


@pytest.mark.parametrize("name", root.commands)
def test_command_when_asked_for_help_then_every_option_is_described(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Usage: swapkit {name} ")
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for parameter in root.commands[name].params:
        for option in parameter.opts:
            if option.startswith("-"):
                assert option in said
                assert f"`{option}" in page, f"docs/command-line.md lacks {option} of {name}"


def test_command_when_unknown_then_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "No such command 'fly'" in capsys.readouterr().err


SCRIPT = "import swapkit, torch\nprint(swapkit.sessions()[-1].limit_bytes)\n"


@pytest.mark.parametrize(
    ("variable", "table", "given", "expected"),
    [
        ("20MiB", "", [], 20),
        ("20MiB", "budget = '30MiB'", [], 20),
        (None, "budget = '30MiB'", [], 30),
        ("20MiB", "budget = '30MiB'", ["--budget", "40MiB"], 40),
    ],
)
def test_run_when_defaults_are_set_then_options_win_and_then_variables(
    variable: str | None, table: str, given: list[str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    text = f"[tool.swapkit.run]\ndevice = 'cpu'\n{table}\n"
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    found = {"PYTHONPATH": str(ROOT)} | ({} if variable is None else {"SWAPKIT_BUDGET": variable})
    command = [sys.executable, "-m", "swapkit", "run", *given, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | found, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected << 20), done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[tool.swapkit.runs]\n", r"\[tool.swapkit.runs\]: expected a command"),
        ("[tool.swapkit.run]\nbuget = 1\n", r"\[tool.swapkit.run\]: expected a command"),
        ("[tool.swapkit.run]\nprogram = 'train.py'\n", r"\[tool.swapkit.run\]: expected a command"),
        ("[tool.swapkit.build]\nwheel = [1]\n", r"\[tool.swapkit.build\]: expected a command"),
        ("[tool.swapkit]\nrun = 1\n", r"\[tool.swapkit.run\]: expected a command"),
        ("[tool]\nswapkit = 1\n", r"\[tool.swapkit\]: expected a table"),
        ("[tool", "pyproject.toml: "),
    ],
)
def test_defaults_when_malformed_or_unknown_then_status_2_and_why(
    text: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["machine"]) == BAD_INPUT
    assert re.search(expected, capsys.readouterr().err)


def test_shell_when_it_asks_for_completion_then_gets_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SWAPKIT_COMPLETE", "zsh_source")
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    assert "compdef" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("a"), BAD_INPUT),
        (InfeasibleBudget("a"), BAD_INPUT),
        (PlanMismatch("a"), BAD_INPUT),
        (Unsupported("a"), BAD_INPUT),
        (DiskError("a"), BAD_INPUT),
        (FileNotFoundError("a"), BAD_INPUT),
        (NativeBuildError("a"), FAILED),
        (OverBudget("a"), FAILED),
        (BackendError("a"), FAILED),
        (SwapkitError("a"), FAILED),
    ],
)
def test_error_when_other_input_would_help_then_status_2_else_1(
    error: Exception, code: int
) -> None:
    assert code_of(error) == code
