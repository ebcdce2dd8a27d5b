"""`swapkit plan` plans a recorded step from files, and refuses with a reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit import cli
from swapkit.ir.codec import read_planned, read_trace, write_machine, write_trace
from swapkit.ir.machines import Machine

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = Machine(budget_bytes=1 << 30, out_bytes_per_second=1e9, in_bytes_per_second=1e9)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a trace and of a machine."""
    folder = tmp_path_factory.mktemp("plan")
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    trace = swapkit.record(lambda: model(torch.ones(512, 64)).sum().backward(), model)
    write_trace(folder / "step.json", trace)
    write_machine(folder / "machine.json", MACHINE)
    return str(folder / "step.json"), str(folder / "machine.json")


def test_plan_when_made_then_text_and_a_file_that_sessions_follow(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, machine = files
    out = tmp_path / "plan.json"
    assert cli.main(["plan", trace, "80%", "--machine", machine, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("plan auto, budget ")
    assert "effect of other budgets (predicted)" in said
    step, made = read_planned(out)
    assert made == swapkit.plan(trace, "80%", machine=machine)
    assert made.budget_bytes == int(0.8 * step.peak_bytes)


def test_plan_when_asked_for_json_then_flat_figures(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, machine = files
    assert cli.main(["plan", trace, "80%", "--machine", machine, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    made = swapkit.plan(trace, "80%", machine=machine)
    assert made.prediction is not None
    assert figures["step_seconds"] == made.prediction.step_seconds
    assert (figures["swapped"], figures["recomputed"]) == made.count_moved()
    assert figures["peak_bytes"] <= figures["budget_bytes"] < figures["plain_peak_bytes"]
    assert all(value is None or isinstance(value, (int, float, str)) for value in figures.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["much"], "budget='much' is not understood"),
        (["4KiB"], "4.00 KiB"),
        (["80%", "--machine", "none.json"], "none.json"),
        (["80%", "--out", "no/such/folder/plan.json"], "no/such/folder"),
        (["80%", "--policy", "guess"], "'guess' is not one of"),
    ],
)
def test_plan_when_it_cannot_be_made_then_status_2_and_the_reason(
    options: list[str], reason: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, machine = files
    rest = [] if "--machine" in options else ["--machine", machine]
    assert cli.main(["plan", trace, *options, *rest]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("command", [["plan", "TRACE", "80%"], ["estimate", "TRACE"]])
def test_trace_when_the_machine_is_not_at_hand_then_its_times_are_modelled(
    command: list[str], files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [files[0] if each == "TRACE" else each for each in command]
    found = []
    for name in ("4090", "h100"):
        assert cli.main([given[0], "--json", "--machine", name, *given[1:]]) == 0
        found.append(json.loads(capsys.readouterr().out))
    slow, fast = (each.get("plain_step_seconds") or each["step_seconds"] for each in found)
    launches = 3e-6 * len(read_trace(files[0]).operators)
    assert launches < fast < 1.1 * launches  # tiny operators: a launch each
    assert slow > fast
