"""The command: its options, its exit statuses, the keys of its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.gpu.outcome import FAILED, FINE, NOT_PREPARED, TARGET_MISSED
from benchmarks.virtual import __main__ as command
from benchmarks.virtual import launch
from benchmarks.virtual.runs import Runner
from benchmarks.virtual.ways import DEFAULT, choose
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.comparison import Figures
    from benchmarks.gpu.configurations import Setup

MIB = 1 << 20
H100 = launch.Machine(name="H100")
KNOWN = [way.name for way in command.ways_of(H100, "1b_4k", 10)]
LORA = [way.name for way in command.ways_of(H100, "7b_lora", 10)]
PEAKS = {"plain": 300 * MIB, "recompute": 160 * MIB}
FREE_MS = {"plain": 10.0, "recompute": 12.0, "auto_at_recompute": 10.4}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.virtual", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("interpreter", "says"),
    [
        ("", "does not name an interpreter with torch for CUDA"),
        ("/nowhere/python", "/nowhere/python does not run"),
        ("/bin/true", "/bin/true has no torch for CUDA"),
    ],
)
def test_command_when_the_interpreter_is_missing_then_status_4_and_how_to_get_one(
    interpreter: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.PYTHON, interpreter)
    with pytest.raises(launch.NotPreparedError, match=says) as raised:
        launch.check_interpreter()
    assert "pip install torch==2.13.0" in str(raised.value)


def test_command_when_nothing_is_prepared_then_one_sentence_and_status_4(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path), SWAPKIT_CUDA_PYTHON="")
    assert done.returncode == NOT_PREPARED == 4
    assert "benchmarks.virtual: SWAPKIT_CUDA_PYTHON does not name an interpreter" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ways", "auto_30"],
        ["--shapes", "2b"],
        ["--shapes", ""],
        ["--machines", "A100"],
        ["--steps", "1"],
        ["--jobs", "0"],
        ["--slowness", "-1"],
    ],
)
def test_command_when_an_option_is_wrong_then_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2


def test_command_when_asked_for_its_ways_then_lists_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--list"]) == FINE
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for shape, name, *_ in lines if shape == "1b_4k"] == KNOWN
    assert [name for shape, name, *_ in lines if shape == "7b_lora"] == LORA
    assert {name for _, name, *rest in lines if rest == ["usual"]} == set(DEFAULT)


def test_parse_when_options_are_given_then_all_of_them_hold() -> None:
    options = command.parse(
        ["--shapes", "1b_4k,transformers", "--machines", "H100 H200", "--slowness", "1"]
    )
    assert options.shapes == ["1b_4k", "transformers"]
    assert options.machines == ["H100", "H200"]
    assert options.slowness == 1.0
    assert options.chosen == [name for name in KNOWN if name in DEFAULT]


def test_choose_when_ways_are_named_then_with_what_their_limits_follow_from() -> None:
    assert choose("auto_40", KNOWN, everything=False) == ["plain", "auto_40"]
    found = choose("swap_at_recompute, offload", KNOWN, everything=False)
    assert found == ["plain", "recompute", "offload", "swap_at_recompute"]
    assert choose("", KNOWN, everything=True) == KNOWN


def test_ways_when_of_a_library_then_without_those_that_need_its_blocks() -> None:
    names = [way.name for way in command.ways_of(H100, "transformers", 10)]
    missing = [name for name in KNOWN if name not in names]
    assert missing == ["selective", "fsdp2_offload", "ramtorch"]


def figures_of(name: str, setup: Setup) -> Figures:
    figures: dict[str, Any] = {
        "outcome": "finished",
        "seconds": 1.0,
        "steps_ms": [FREE_MS.get(name, 10.5)] * setup.timed_steps,
        "host_free_ms": FREE_MS.get(name, 10.5),
        "in_use_peak_bytes": PEAKS.get(name, 120 * MIB),
        "resident_bytes": 100 * MIB,
        "kernels": 1000.0,
        **dict.fromkeys(("step_out_bytes", "step_in_bytes", "step_maps", "step_unmaps"), 0.0),
    }
    if setup.limit_bytes:
        figures |= {"step_rescues": 0.0, "step_replans": 0.0, "plan_changes": 0.0}
        figures |= {"planned_bytes": 0.0, "recorded_ms": 66.0, "true_ms": 65.0}
        figures["budget_bytes"] = setup.limit_bytes
    return figures


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figures]:
    """Let no process run; return what is to be found for some of the ways."""
    found: dict[str, Figures] = {}

    def run_way(_runner: Runner, name: str, setup: Setup, _ended: object) -> Figures:
        return figures_of(name, setup) | found.get(name, {})

    monkeypatch.setattr(Runner, "_run_way", run_way)
    monkeypatch.setattr(launch, "check_interpreter", lambda: None)
    monkeypatch.setattr(launch, "prepare", lambda _machine, _log: None)
    return found


def run_main(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "figures.json"
    status = command.main(["--output", str(tmp_path), "--json", str(path), *arguments])
    return status, json.loads(path.read_text(encoding="utf-8"))


def test_figures_when_other_ways_run_or_fail_then_the_keys_stay(
    tmp_path: Path, processes: dict[str, Figures], capsys: pytest.CaptureFixture[str]
) -> None:
    status, usual = run_main(tmp_path)
    assert status == FINE
    assert "all checks passed" in capsys.readouterr().out
    assert usual["H100_1b_4k_auto_40_step_ms"] == 10.5
    assert usual["H100_1b_4k_auto_40_limit_bytes"] == 180 * MIB  # 100 stay, 40 % of the other 200
    assert usual["H100_1b_4k_auto_at_recompute_limit_bytes"] == 160 * MIB
    assert usual["H100_1b_4k_check_step_auto_at_recompute"] == "met"
    assert usual["H100_1b_4k_torchtune_step_ms"] is None
    assert all(isinstance(value, (int, float, str, type(None))) for value in usual.values())
    assert set(run_main(tmp_path, "--ways", "plain")[1]) == set(usual)
    assert set(run_main(tmp_path, "--all")[1]) == set(usual)
    processes["plain"] = {"outcome": "failed: stopped"}
    status, failed = run_main(tmp_path)
    assert set(failed) == set(usual)
    assert failed["H100_1b_4k_auto_40_outcome"] == "not run"
    assert failed["H100_1b_4k_recompute_step_ratio"] is None


def test_command_when_a_target_is_missed_or_a_way_fails_then_other_statuses(
    tmp_path: Path, processes: dict[str, Figures], capsys: pytest.CaptureFixture[str]
) -> None:
    processes["auto_40"] = {"step_maps": 0.5}
    status, figures = run_main(tmp_path)
    assert status == TARGET_MISSED == 5
    assert figures["H100_1b_4k_check_maps_auto_40"] == "missed"
    assert (
        "missed: H100_1b_4k: auto_40: maps and unmaps in a stable step: 0.5"
        in capsys.readouterr().out
    )
    processes["auto_40"] = {"outcome": "out of memory"}
    status, figures = run_main(tmp_path)
    assert status == FAILED == 1
    assert figures["H100_1b_4k_check_failures"] == "BROKEN"
    assert figures["H100_1b_4k_check_maps_auto_40"] == "not measured"


def test_command_when_libraries_are_missing_then_counted_and_no_failure(
    tmp_path: Path, processes: dict[str, Figures], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torchtune", "trl"):
        processes[name] = {"outcome": f"{name} is not installed (no module)"}
    status, _ = run_main(tmp_path, "--ways", "torchtune trl")
    assert status == FINE
    said = capsys.readouterr().out
    assert "did not run 2 ways, their libraries missing: torchtune, trl" in said
    assert "swap_40" not in said  # nor rows that were not asked for
