"""The rows of pipelines planned as a whole: gains that are possible, and memory that is saved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks._planner_models import SHAPES
from benchmarks.pipelines import __main__ as command
from benchmarks.pipelines.claim_stages import Stage
from benchmarks.pipelines.rows import Scale, measure_fewer_ranks, measure_scale, measure_seed
from benchmarks.pipelines.schedules import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

TINY = Stage(
    shape=SHAPES["tiny"], layers=1, tokens=512, batch=2, schedule="1f1b", stages=3, microbatches=3
)


@pytest.mark.promise("D9")
@pytest.mark.promise("F13")
def test_seed_row_when_planned_together_then_no_slower_than_separate_and_possible() -> None:
    found = measure_seed(TINY, spare=0.3, link_bytes_per_s=24e9)
    assert found["settled"]
    assert found["separate_gain"] - 1e-8 <= found["joint_gain"] <= found["most"] + 1e-9
    assert found["joint_gain"] > 0
    assert found["joint_bytes"] <= found["separate_bytes"]


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_long_row_when_the_link_is_slow_then_less_memory_at_the_same_time(name: str) -> None:
    scale = Scale(name=name, ranks=8, microbatches=16, layers=1, tokens=4096, shape="7b")
    found = measure_scale(scale, share=0.3, link_bytes_per_s=8e9)
    assert found["complete"]
    assert found["joint_slower"] <= found["separate_slower"] + 1e-8
    assert found["joint_bytes"] < found["separate_bytes"] < found["free_bytes"]


@pytest.mark.promise("F6")
def test_fewer_ranks_row_when_memory_is_equal_then_the_gain_is_computed() -> None:
    found = measure_fewer_ranks(
        memory_bytes=80 << 30, link_bytes_per_s=24e9, network_bytes_per_s=150e9
    )
    assert found["gain"] == pytest.approx(found["most"])
    assert found["gain"] > 0.25  # the claim
    assert found["tp1_peak_bytes"] > 4 * found["tp8_peak_bytes"]
    slow = measure_fewer_ranks(
        memory_bytes=4 << 30, link_bytes_per_s=24e9, network_bytes_per_s=150e9
    )
    assert slow["gain"] is None  # the weights alone do not fit
    assert slow["least_bytes"] > 4 << 30


def test_rows_when_listed_then_up_to_1024_ranks_and_written_flat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = list(command.list_scales(1024))
    assert {each.name for each in scales if each.ranks == 8} == set(SCHEDULES)
    assert max(each.ranks for each in scales) == 1024
    quick = [Scale(name="1F1B", ranks=2, microbatches=4, layers=1, tokens=512, shape="tiny")]
    monkeypatch.setattr(command, "list_scales", lambda _: quick)
    command.main(["--only", "schedules", "--json", str(tmp_path / "rows.json")])
    figures = json.loads((tmp_path / "rows.json").read_text())
    assert figures["1F1B_2_jobs"] == 2 * 2 * 4
    assert "1F1B" in capsys.readouterr().out
