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


@pytest.mark.promise("A3")
def test_demo_when_run_at_half_the_peak_then_the_budget_holds_and_the_numbers_stay(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "swapkit", "demo", "--size", "tiny", "--budget", "50%"]
    command += ["--sweep", "40%", "--sweep-steps", "1"]
    done = subprocess.run(
        [*command, "--json", "-", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["ok"] is True
    assert facts["runs"] == ["a", "b", "c", "d50", "e50"]
    budget_bytes = facts["e50.budget_bytes"]
    assert budget_bytes == facts["a.peak_bytes"] // 2
    assert facts["d50.outcome"] == "OutOfMemoryError"
    assert "budget" in facts["d50.error"]
    check_budgeted(facts, budget_bytes)
    check_sweep(facts)
    assert facts["b.bit_equal"]
    assert abs(facts["b.allocated_peak_bytes"] / facts["a.peak_bytes"] - 1) < 0.05
    assert (tmp_path / "out/chart.png").read_bytes().startswith(PNG)
    assert json.loads((tmp_path / "out/result.json").read_text()) == facts


def check_budgeted(facts: dict[str, Any], budget_bytes: int) -> None:
    """The run within the budget: rescued, equal, and seen by the kernel to stay within."""
    assert facts["e50.outcome"] == "finished"
    assert facts["e50.losses"] == facts["a.losses"]
    assert len(facts["e50.losses"]) == 5
    assert facts["e50.parameters_sha256"] == facts["a.parameters_sha256"]
    assert facts["e50.rescues"] > 0
    assert facts["e50.swapped_out_bytes"] > 0
    assert facts["e50.swapped_in_bytes"] > 0
    assert 0 < facts["e50.peak_bytes"] <= budget_bytes
    assert max(nbytes for _, nbytes in facts["e50.series"]) <= budget_bytes
    if sys.platform == "linux":
        assert 0 < facts["e50.witness_peak_bytes"] <= budget_bytes
        assert facts["e50.witness_looks"] > 0


def check_sweep(facts: dict[str, Any]) -> None:
    """Every policy on both links: within the budget, stable in time, and equal."""
    for link in ("fast", "slow"):
        point = f"sweep.{link}.40"
        for policy in ("rescue", "swap", "recompute", "auto"):
            run = f"{point}.{policy}"
            if facts[f"{run}.outcome"] != "finished":
                assert policy == "recompute", "only that may not fit"
                continue
            assert facts[f"{run}.bit_equal"]
            assert facts[f"{run}.stage"] == "stable"
            assert 0 < facts[f"{run}.peak_bytes"] <= facts[f"{point}.budget_bytes"]
        assert facts[f"{point}.auto.late_rescues"] == 0
    assert facts["sweep.slow.40.bytes_per_s"] > facts["sweep.fast.40.bytes_per_s"] == 0
