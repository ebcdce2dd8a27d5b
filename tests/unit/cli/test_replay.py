"""`swapkit replay` compares allocators, and refuses with a reason."""

from __future__ import annotations

import importlib.util
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from swapkit import cli as command_line
from swapkit.ir.codec import write_allocations
from tests.unit.ir.test_snapshot_allocations import SNAPSHOT
from tests.unit.simulation.allocators.test_replaying import HOLES

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_allocations(tmp_path / "trace.json", HOLES)
    return str(tmp_path / "trace.json")


@pytest.mark.promise("E4")
def test_replay_when_run_then_each_allocator_has_a_row(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["replay", trace, "--budget", "130MiB"]) == 0
    said = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert "180.00 MiB" in rows["torch"]
    assert "within 130.00 MiB" in said
    assert rows["planned addresses (layout +0.00%)"].endswith("fits")
    assert "+0.00%" in rows["planned addresses (layout +0.00%)"]


def test_replay_when_asked_for_json_then_its_figures(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert command_line.main(["replay", trace, "--budget", "119MiB", "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert (figures["format"], figures["version"]) == ("swapkit replay", 1)
    assert figures["max_live_bytes"] == figures["max_live_rounded_bytes"] == 130 * MIB
    assert figures["budget_bytes"] == 119 * MIB
    names = ["torch_native", "torch_expandable", "pool", "planned"]
    assert list(figures["allocators"]) == names
    native = figures["allocators"]["torch_native"]
    assert native["peak_reserved_bytes"] == 180 * MIB
    assert native["external"] == pytest.approx(180 / 130 - 1)
    assert native["within_budget"]["failure"] == {
        "event": 3, "block": 3, "asked_bytes": 30 * MIB, "reserved_bytes": 90 * MIB,
        "allocated_bytes": 90 * MIB,
    }  # fmt: skip
    assert figures["allocators"]["planned"]["layout_excess"] == 0
    assert native["layout_excess"] is None


def test_replay_when_asked_for_the_least_budget_then_in_both(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert command_line.main(["replay", trace, "--least", "--json", str(file)]) == 0
    assert "fits from" in capsys.readouterr().out
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert figures["allocators"]["planned"]["least_budget_bytes"] == 130 * MIB


def test_replay_when_asked_for_a_plot_then_drawn(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "addresses.png"
    assert command_line.main(["replay", trace, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_replay_when_matplotlib_is_missing_then_says_how_to_get_it(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert command_line.main(["replay", trace, "--plot", "addresses.png"]) == 1
    said = capsys.readouterr()
    assert said.err == "--plot needs matplotlib: pip install 'swapkit[demo]'\n"
    assert said.out == ""


def test_snapshot_when_of_several_devices_then_one_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.pickle"
    history = SNAPSHOT["device_traces"][0]
    file.write_bytes(pickle.dumps(SNAPSHOT | {"device_traces": [history, history]}))
    assert command_line.main(["replay", str(file)]) == 2
    assert "devices [0, 1] have a history; pass device=" in capsys.readouterr().err
    assert command_line.main(["replay", str(file), "--device", "0"]) == 0
    assert "step.pickle: 6 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--budget", "much"], "--budget='much' is not understood"),
        (["--budget", "50%"], "a share is not supported here"),
        (["--plot", "chart.svg"], "--plot 'chart.svg': expected a file whose name ends in .png"),
        (["--plot", "no/such/chart.png"], "there is no folder 'no/such'"),
        (["--json", "no/such/file.json"], "no/such' does not exist"),
        (["--device", "1"], "--device 1"),
    ],
)
def test_replay_when_an_option_makes_no_sense_then_status_2_and_the_reason(
    trace: str, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["replay", trace, *options]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("swapkit replay: ")
    assert reason in said.err
    assert said.out == ""


def test_replay_when_there_is_no_file_or_no_block_then_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["replay", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    empty = tmp_path / "empty.csv"
    empty.write_text("lower,upper,size\n", encoding="utf-8")
    assert command_line.main(["replay", str(empty)]) == 2
    assert "the trace has no allocation to replay" in capsys.readouterr().err
