"""`swapkit run` writes the files of its session: a report, a timeline, a plan, for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from swapkit.ir.codec import read_planned
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """
import torch
from torch import nn
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(24):
    model(torch.randn(1024, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "swapkit", "run", *options, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def test_files_when_asked_for_then_written_and_named_by_rank(tmp_path: Path) -> None:
    options = ("--budget", "4MiB", "--report", "run.html", "--trace", "trace.json")
    done = run(tmp_path, *options, "--save-plan", "plan.json", RANK="1")
    assert done.returncode == 0, done.stderr
    assert "swapkit run:" not in done.stderr, "of rank 0 alone"
    assert (tmp_path / "run.rank1.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "trace.rank1.json").read_text(encoding="utf-8"))["traceEvents"]
    _, plan = read_planned(tmp_path / "plan.rank1.json")
    assert plan.budget_bytes <= 4 << 20


def test_report_when_its_name_is_wrong_then_refused_before_the_script_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "--budget", "4MiB", "--report", "run.pdf")
    assert done.returncode == 2
    assert "run.pdf': expected a name that ends in .html" in done.stderr
    assert done.stderr.count("\n") == 1


def test_trace_when_its_name_is_wrong_then_refused_before_the_script_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "--budget", "4MiB", "--trace", "trace.txt")
    assert done.returncode == 2
    assert "trace.txt': expected a name that ends in .json" in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_when_the_script_changes_its_folder_and_ends_oddly_then_where_they_were_asked_for(
    tmp_path: Path,
) -> None:
    odd = "class Stop(BaseException): pass\nimport os, torch\nos.chdir('/')\nraise Stop"
    (tmp_path / "odd.py").write_text(odd, encoding="utf-8")
    command = [sys.executable, "-m", "swapkit", "run", "--device", "cpu", "--budget", "64MiB"]
    done = subprocess.run(
        [*command, "--trace", "trace.json.gz", "odd.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": ""},
    )
    assert done.returncode == 1, done.stderr
    assert "cli/script.py" not in done.stderr
    assert done.stderr.endswith(", 0 steps, 0 rescues\n")
    assert (tmp_path / "trace.json.gz").is_file()


def test_budget_when_it_is_chosen_then_what_is_free(tmp_path: Path) -> None:
    done = run(tmp_path, "--budget", "auto")
    assert done.returncode == 0, done.stderr
    assert ", 24 steps, 0 rescues" in done.stderr
