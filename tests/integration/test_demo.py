"""The demo, end to end: what its table says is so."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"
LABELS = ["plain", "plain, torch's allocator", "recompute every block", "swapkit at 50%"]
STEPS = 3


def run_demo(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """What the demo printed, and its figures."""
    command = [sys.executable, "-m", "swapkit", "demo", "--size", "tiny", "--budget", "50%"]
    facts = folder / "facts.json"
    done = subprocess.run(
        [*command, "--json", str(facts), "--output", str(folder / "out"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(facts.read_text())


@pytest.mark.promise("A3")
def test_demo_when_run_at_half_the_peak_then_the_budget_holds_and_the_numbers_stay(
    tmp_path: Path,
) -> None:
    done, facts = run_demo(tmp_path)
    said = done.stdout.strip().splitlines()
    assert said[0].startswith("swapkit trains within 50% of the memory that plain training needs")
    for label in LABELS:
        assert f"\n{label}: " in f"\n{done.stderr}", "a line for every run that finished"
    assert facts["ok"] is True
    assert list(facts["runs"]) == LABELS
    check_race(facts["runs"], facts["trials"])
    assert facts["sweep"] == []
    assert (tmp_path / "out/chart.png").read_bytes().startswith(PNG)
    assert json.loads((tmp_path / "out/result.json").read_text()) == facts


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.promise("A3")
def test_demo_when_it_sweeps_then_every_policy_holds_its_budget_on_both_links(
    tmp_path: Path,
) -> None:
    _, facts = run_demo(tmp_path, "--sweep", "40%", "--sweep-steps", "1")
    check_sweep(facts["sweep"])


def check_race(runs: dict[str, Any], trials: dict[str, Any]) -> None:
    """All runs equal; the one within a budget timed with a plan, and within it by the kernel."""
    plain, alone, recompute, budgeted = (runs[label] for label in LABELS)
    budget_bytes = budgeted["budget_bytes"]
    assert budget_bytes == plain["peak_bytes"] // 2
    assert trials["plain at 50%"]["budget_bytes"] == budget_bytes
    assert "budget" in trials["plain at 50%"]["error"]
    for run in (plain, recompute, budgeted):
        assert run["losses"] == alone["losses"]
        assert run["state_sha256"] == alone["state_sha256"]
        assert len(run["step_seconds"]) == STEPS
    assert len(set(plain["losses"])) == len(plain["losses"]) > STEPS
    assert recompute["peak_bytes"] < plain["peak_bytes"]
    assert budgeted["stage"] == "stable"
    assert budgeted["swapped_out_bytes"] + budgeted["recomputed_regions"] > 0
    assert 0 < budgeted["peak_bytes"] <= budget_bytes
    assert 0 < max(nbytes for _, nbytes in budgeted["series"]) <= budget_bytes
    if sys.platform == "linux":
        assert 0 < budgeted["witness_peak_bytes"] <= budget_bytes
        assert budgeted["witness_looks"] > 0


def check_sweep(points: list[dict[str, Any]]) -> None:
    """Every policy on both links: within the budget, timed with a plan, and equal."""
    fast, slow = points
    assert slow["bytes_per_s"] > fast["bytes_per_s"] == 0
    for point in points:
        for policy in ("rescue", "swap", "recompute", "auto"):
            run = point["runs"][policy]
            if run["error"] is not None:
                assert policy == "recompute", "only that may not fit"
                continue
            assert run["bit_equal"]
            assert run["stage"] == "stable"
            assert 0 < run["peak_bytes"] <= point["budget_bytes"]
        assert point["runs"]["auto"]["late_rescues"] == 0
