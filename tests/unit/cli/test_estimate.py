"""`swapkit estimate` reads a recorded step, or records one of an unchanged script."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit import cli
from swapkit.ir.codec import write_machine, write_trace
from swapkit.ir.machines import Machine
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = Machine(budget_bytes=1 << 30, out_bytes_per_second=1e9, in_bytes_per_second=1e9)
TRAIN = """
import os, sys, torch
model = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(2048, 64)
os.write(1, b"from C\\n")
os.system("echo from a child")
for number in range(int(sys.argv[1])):
    print("step", number)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(7)
"""


@pytest.fixture
def machine(tmp_path: Path) -> str:
    write_machine(tmp_path / "machine.json", MACHINE)
    return str(tmp_path / "machine.json")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swapkit", "estimate", "--device", "cpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


# In a process of its own: what else lives in a process counts.
FUNCTION = """
import json, sys, torch, swapkit
swapkit.install(device="cpu")
model = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(2048, 64)
def step():
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(swapkit.estimate(step, model, optimizer, machine=sys.argv[1]).to_dict()))
"""


def estimate_by_function(machine: str) -> dict[str, Any]:
    """Return the estimate of the script's step by the function."""
    done = subprocess.run(
        [sys.executable, "-c", FUNCTION, machine],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_estimate_when_given_a_script_then_the_figures_of_the_function(
    script: str, machine: str
) -> None:
    done = run("--machine", machine, "--budget", "60%", "--json", script, "40")
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)  # and nothing else
    assert all(text in done.stderr for text in ("step 2", "from C", "from a child"))
    assert "step 10" not in done.stderr  # it ends once a step is recorded
    expected = estimate_by_function(machine)
    for name in ("plain_bytes", "smallest_budget_bytes", "floor_bytes"):
        assert found[name] == pytest.approx(expected[name], rel=0.03)
    assert found["budgets_0"] == pytest.approx(0.6 * found["plain_bytes"], rel=0.01)
    assert found["times_0_budget_bytes"] == found["streamed_budget_bytes"]


def test_estimate_when_a_script_ends_too_early_then_it_says_what_is_missing(script: str) -> None:
    done = run(script, "2")
    assert done.returncode == 7, done.stderr[-4000:]
    assert "the script failed before a step was recorded" in done.stderr


def test_estimate_when_given_a_trace_then_its_figures(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    trace = swapkit.record(lambda: model(torch.ones(512, 64)).sum().backward(), model)
    write_trace(tmp_path / "step.json", trace)
    assert cli.main(["estimate", "--machine", machine, str(tmp_path / "step.json")]) == 0
    said = capsys.readouterr().out
    assert "smallest budget" in said
    assert "of plain" in said


def test_estimate_when_a_trace_has_arguments_then_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["estimate", "step.json", "more"]) == 2
    assert "it takes no arguments" in capsys.readouterr().err


def test_estimate_when_nothing_is_given_then_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate"]) == 2
    assert "expected a script" in capsys.readouterr().err
