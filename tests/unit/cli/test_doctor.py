"""`swapkit doctor` names each problem with its remedy, and ends with 1 if there is one."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit import cli
from swapkit._runtime.shim import build
from swapkit.cli import doctor
from swapkit.cli.doctor import Finding, Level, run_check
from swapkit.errors import NativeBuildError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD = Finding(name="torch", text="torch 2.13")
NOTE = Finding(name="numa", text="unknown", level=Level.NOTE, remedy="install lspci")
BAD = Finding(name="cache", text="full\ndisk", level=Level.PROBLEM, remedy="make room")


def let_find(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    def make(finding: Finding) -> Callable[[], Finding]:
        return lambda: finding

    monkeypatch.setattr(doctor, "CHECKS", [(each.name, make(each)) for each in findings])


def test_doctor_when_a_check_runs_then_the_rows_before_it_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def check() -> Finding:
        seen.append(capsys.readouterr().out)
        return GOOD

    monkeypatch.setattr(doctor, "CHECKS", [("numa", lambda: NOTE), ("torch", check)])
    assert cli.main(["doctor"]) == 0
    assert seen == ["note     numa         unknown\n"]


@pytest.mark.parametrize(("findings", "code"), [([GOOD, NOTE], 0), ([GOOD, NOTE, BAD], 1)])
def test_doctor_when_run_then_a_line_for_each_check_and_the_remedies(
    findings: list[Finding],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    let_find(monkeypatch, *findings)
    assert cli.main(["doctor"]) == code
    said = capsys.readouterr().out
    assert "torch        torch 2.13\n" in said
    assert "note: numa: unknown\n       -> install lspci\n" in said
    assert ("problem: cache: full\ndisk\n       -> make room\n" in said) is (code == 1)
    assert said.endswith(f"\n{code} problem(s), 1 note(s)\n")


def test_doctor_when_asked_for_json_then_flat_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    let_find(monkeypatch, GOOD, BAD)
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "problems": 1,
        "notes": 0,
        "torch": "ok",
        "torch_text": "torch 2.13",
        "torch_remedy": "",
        "cache": "problem",
        "cache_text": "full\ndisk",
        "cache_remedy": "make room",
    }


def test_torch_when_swapkit_is_not_installed_then_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch>=2"])
    assert "imported from a folder" not in doctor.check_torch().text
    monkeypatch.setattr(importlib.metadata, "requires", fail)
    found = run_check("torch", doctor.check_torch)
    assert found.level is Level.NOTE
    assert "imported from a folder" in found.text


def test_check_when_it_raises_then_a_problem() -> None:
    def check() -> Finding:
        raise NativeBuildError("it does not compile")

    found = run_check("cache", check)
    assert found.level is Level.PROBLEM
    assert "it does not compile" in found.text


@pytest.mark.parametrize(("is_compiled", "level"), [(False, Level.PROBLEM), (True, Level.NOTE)])
def test_compiler_when_there_is_none_then_a_problem_unless_the_shim_is_compiled(
    is_compiled: bool, level: Level, monkeypatch: pytest.MonkeyPatch, user_cache: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    if is_compiled:
        user_cache.mkdir()
        (user_cache / build.shim_name()).touch()
    found = doctor.check_compiler()
    assert found.level is level
    assert "apt-get install g++" in found.remedy


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.10.0", Level.GOOD),
        ("2.13.0+cpu", Level.GOOD),
        ("2.14.0a0+git12ab34c", Level.GOOD),
        ("2.12.0", Level.NOTE),
        ("2.16.0", Level.NOTE),
        ("2.9.1", Level.PROBLEM),
        ("3.0.0a0", Level.PROBLEM),
    ],
)
def test_release_when_untested_then_a_note_and_out_of_range_a_problem(
    version: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["numpy>=1", "torch<3,>=2.10"])
    found = doctor.check_torch()
    assert found.level is level
    if level is Level.NOTE:
        assert found.text == f"torch {version} is untested with this swapkit"
    assert found.remedy.startswith("pip install 'torch<3,>=2.10'") is (level is Level.PROBLEM)


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("max_split_size_mb:64", Level.GOOD),
        ("backend:cudaMallocAsync", Level.NOTE),
        ("no_such_key:1", Level.PROBLEM),
    ],
)
def test_environment_when_torchs_variable_is_set_then_judged(
    value: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    found = doctor.check_environment()
    assert found.level is level, found
    assert value.partition(":")[0] in found.text


def test_training_when_its_process_fails_then_a_problem_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="a\nnothing was moved\n")

    monkeypatch.setattr(subprocess, "run", fail)
    found = doctor.check_training()
    assert found.level is Level.PROBLEM
    assert "exit code 1: nothing was moved" in found.text


def test_checks_when_run_here_then_no_problem() -> None:
    """All but those that measure or train."""
    quick = {name: check for name, check in doctor.CHECKS if name not in {"link", "training"}}
    found = [run_check(name, check) for name, check in quick.items()]
    assert [each.name for each in found] == list(quick)
    assert not [each for each in found if each.level is Level.PROBLEM]
