"""The command and the make target: parts, exit statuses, what survives a crash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import machine
from benchmarks.gpu.outcome import NO_GPU, NOT_PREPARED, Outcome, figures_of, format_summary
from benchmarks.gpu.part import report_path
from benchmarks.gpu.parts import MOST_SECONDS, PARTS, choose, limit_of
from benchmarks.gpu.process import python, run_process
from benchmarks.gpu.report import Check, Report
from tests.meta.sources import ROOT

NO_DRIVER = {"SWAPKIT_CUDA_DRIVER": "libcuda-that-is-not-there.so.1"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_command_when_there_is_no_gpu_then_says_so_with_status_3(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path), **NO_DRIVER)
    assert done.returncode == NO_GPU == 3
    assert "no NVIDIA GPU: the driver's library" in done.stderr
    assert "Traceback" not in done.stderr


def test_make_when_there_is_no_gpu_then_shows_the_sentence_and_the_status(tmp_path: Path) -> None:
    # A `make` around the tests hands its own variables down, such as ARGS.
    variables = {f"OUT={tmp_path}", f"GPU_PYTHON={sys.executable}", "ARGS=", "PARTS=", "WHEELS="}
    done = run("make", "gpu", *variables, **NO_DRIVER)
    assert done.returncode == 2, "make has no other status for a command that fails"
    assert "no NVIDIA GPU" in done.stderr
    assert "Error 3" in done.stderr


def test_command_when_torch_has_no_cuda_then_status_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "missing_gpu", lambda: None)
    monkeypatch.setattr(machine, "missing_torch", lambda: "torch x is built without CUDA")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert command.main(["--output", str(tmp_path)]) == NOT_PREPARED == 4
    assert "built without CUDA" in capsys.readouterr().err


def test_command_when_asked_for_its_parts_then_lists_them_without_a_gpu() -> None:
    done = run(sys.executable, "-m", "benchmarks.gpu", "--list", **NO_DRIVER)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [p.name for p in PARTS]


@pytest.mark.parametrize("arguments", [["--parts", "lnik"], ["--device", "cpu"]])
def test_command_when_line_is_wrong_then_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2


def test_choose_when_names_are_given_then_in_order_and_train_means_all() -> None:
    assert [part.name for part in choose("pool, link", quick=False)] == ["link", "pool"]
    trained = [part.name for part in choose("train", quick=False)]
    assert trained == ["train_1b_4k", "train_1b_8k", "train_8b_8k", "train_8b_32k"]
    assert choose("", quick=False) == list(PARTS)
    quick = choose("", quick=True)
    assert [part.name for part in quick] == [part.name for part in PARTS if part.quick_seconds]
    assert sum(limit_of(part, quick=True, asked_seconds=None) for part in quick) <= 300


def test_choose_when_dry_then_what_a_tiny_shape_stands_for_runs_once_and_is_not_cut_short() -> None:
    dry = choose("", quick=False, dry=True)
    names = ["contract", "link", "pool", "operators", "train_1b_4k", "transformers"]
    assert [part.name for part in dry] == names
    assert [part.name for part in choose("train_8b_8k", quick=False, dry=True)] == ["train_8b_8k"]
    for part in dry:
        limit = limit_of(part, quick=False, asked_seconds=None, dry=True)
        assert limit > limit_of(part, quick=False, asked_seconds=None)
    assert limit_of(dry[0], quick=False, asked_seconds=7.0, dry=True) == 7.0


def test_choose_when_first_then_five_minutes_with_what_prepares_them() -> None:
    first = choose("", quick=False, first=True)
    assert [part.name for part in first] == ["contract", "link", "train_1b_4k"]
    limits = [limit_of(part, quick=False, first=True, asked_seconds=None) for part in first]
    assert limits == [part.first_seconds for part in first]
    assert sum(limits) <= 240  # the core and the shim are compiled in the rest of them


def test_parts_when_loaded_then_each_can_run_and_is_below_nine_minutes() -> None:
    for part in PARTS:
        assert callable(part.load(dry=False))
        assert limit_of(part, quick=False, asked_seconds=None) <= MOST_SECONDS
        assert limit_of(part, quick=True, asked_seconds=None) > 0
        assert limit_of(part, quick=False, asked_seconds=7.0) == 7.0


def report_with(*checks: Check) -> Report:
    return Report(part="link", checks={check.name: check for check in checks})


def test_status_when_something_is_broken_failed_or_missed_then_differs() -> None:
    good = Check(name="a", text="a", value=1.0, at_least=1)
    slow = Check(name="b", text="b", value=0.5, at_least=1)
    wrong = Check(name="c", text="c", value=0.0, at_least=1, promise=True)
    assert Outcome(reports=[report_with(good)]).status == 0
    assert Outcome(reports=[report_with(good, slow)]).status == 5
    assert Outcome(reports=[report_with(slow, wrong)]).status == 1
    assert Outcome(reports=[report_with(good)], failures={"x": "crashed"}).status == 1
    summary = format_summary(Outcome(reports=[report_with(slow, wrong)]))
    assert "BROKEN: link: c: 0, at least 1" in summary
    assert "missed: link: b: 0.5, at least 1" in summary


def test_figures_when_flat_then_header_outcome_and_parts_are_there() -> None:
    report = Report(part="link")
    report.row("t", "out", {"ratio": 1.0})
    outcome = Outcome(reports=[report, Report(part="pool")], failures={"pool": "gone"})
    assert figures_of(outcome, {"gpu": "X"}, dry=False) == {
        "machine_gpu": "X",
        "dry": 0,
        "link_outcome": "finished",
        "link_out_ratio": 1.0,
        "pool_outcome": "gone",
    }


def test_parts_when_one_crashes_then_its_rows_and_the_others_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from benchmarks.gpu.report import Report
name = sys.argv[1]
report = Report(part=name, path=Path(sys.argv[2]) / f"part-{name}.json")
report.row("t", "first", {"ratio": 1.0})
if name == "link":
    os.kill(os.getpid(), signal.SIGSEGV)
report.row("t", "second", {"ratio": 2.0})
"""

    def fake(*arguments: str) -> list[str]:
        return [sys.executable, "-c", code, arguments[2], str(tmp_path)]

    monkeypatch.setattr(command, "python", fake)
    options = command.parse(["--dry", "--parts", "link pool", "--output", str(tmp_path)])
    outcome = command.run_parts(options, tmp_path)
    assert outcome.failures == {"link": "ended by signal SIGSEGV"}
    assert outcome.status == 1
    command.write_results(options, tmp_path, outcome, {"device": "cpu"})
    figures = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert figures["link_first_ratio"] == figures["pool_first_ratio"] == 1.0
    assert "link_second_ratio" not in figures
    assert figures["link_outcome"] == "ended by signal SIGSEGV"
    assert "FAILED" in capsys.readouterr().out
    assert "FAILED: link" in (tmp_path / "gpu.txt").read_text(encoding="utf-8")
    assert report_path(tmp_path, "pool").exists()


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_process_when_it_runs_too_long_then_ended_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "log"
    done = run_process(python("-c", code), seconds=2.0, log=log, cwd=tmp_path)
    assert done.timed_out
    assert not done.ok
    assert done.describe().startswith("stopped after")
    pid = int(pid_file.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 60  # a process that was killed dies when it next has a turn
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_process_when_it_fails_then_the_error_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "raise ValueError('no such thing\\nmore of it')"
    done = run_process(python("-c", code), seconds=30, log=log, cwd=tmp_path)
    assert done.describe() == "status 1: ValueError: no such thing"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_link_part_when_run_dry_then_reports_and_status_0(tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "-m", "benchmarks.gpu", "--dry", "--parts", "link"),
        *("--output", str(tmp_path), "--json", str(tmp_path / "x.json")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert figures["dry"] == 1
    assert figures["link_outcome"] == "finished"
    assert figures["link_check_bytes_1MiB"] == "met"
    assert figures["link_out_1MiB_ratio"] > 0
    assert "DRY RUN" in done.stdout
