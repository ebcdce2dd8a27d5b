"""The demo, end to end: what its table says is so, and it refuses to say what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from examples import demo
from tests.support import MIB, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"
ALONE, LIMITED, TRIAL = "plain, torch's allocator", "swapkit at 50%", "plain at 50%"
LABELS = ["plain", ALONE, "recompute every block", LIMITED, TRIAL]
ARGUMENTS = ["--size", "tiny", "--budget", "50%"]

Results = dict[str, demo.Result]


def run_demo(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What the demo printed, and its figures; it must end well."""
    command = [sys.executable, str(ROOT / "examples/demo.py"), *ARGUMENTS, "--output", str(folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Results]:
    """What the demo printed, its folder, and its runs by their labels."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    said, figures = run_demo(folder)
    assert figures["problems"] == figures["sweep"] == []
    results = [demo.Result(**each | {"run": demo.Run(**each["run"])}) for each in figures["runs"]]
    return said, folder, {each.run.label: each for each in results}


@pytest.fixture
def results(whole: tuple[str, Path, Results]) -> Results:
    return dict(whole[2])


@pytest.mark.promise("A3")
def test_demo_when_run_at_half_the_peak_then_the_budget_holds_and_the_numbers_stay(
    results: Results,
) -> None:
    assert list(results) == LABELS
    plain, alone, recompute, limited, trial = results.values()
    budget_bytes = limited.run.limit_bytes
    assert budget_bytes == trial.run.limit_bytes == plain.peak_bytes // 2
    assert "out of memory" in trial.error
    assert not trial.seconds
    for each in (plain, recompute, limited):
        count = len(each.losses)
        assert each.losses == alone.losses[:count]
        assert each.digests == [alone.digests[count - 1]]
        assert len(each.seconds) == 3
    assert len(set(alone.losses)) == len(alone.losses) > len(limited.losses) > 3
    assert recompute.peak_bytes < plain.peak_bytes
    assert limited.stage == "stable"
    assert limited.host_peak_bytes
    assert 0 < limited.peak_bytes <= budget_bytes
    assert 0 < max(nbytes for _, nbytes in limited.series) <= budget_bytes
    for each in (plain, limited):
        assert len(each.ranges) == 4, "two stops in the first step, two in the last but one"
        assert 0.9 * each.peak_bytes < (each.resident_bytes or 0) <= each.peak_bytes


def test_demo_when_run_then_a_line_as_each_run_ends_the_table_and_the_picture(
    whole: tuple[str, Path, Results],
) -> None:
    said, folder, _ = whole
    lines = said.splitlines()
    assert [line.partition(": ")[0] for line in lines[: len(LABELS)]] == LABELS
    assert lines[len(LABELS)].startswith("swapkit trains within 50% of the memory that plain")
    (heading,) = (at for at, line in enumerate(lines) if line.startswith("run "))
    assert lines[heading].split() == ["run", *["MiB"] * 4, "ms", "plain", "bits"]
    table = lines[heading + 2 :]
    for label, line in zip(LABELS, table, strict=False):
        assert line.startswith(f"{label} ")
        assert line.rstrip().endswith({ALONE: "-", TRIAL: "out of memory"}.get(label, "yes"))
    assert (folder / "chart.png").read_bytes().startswith(PNG)


@pytest.fixture
def refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """What the demo says is broken; its status must not be that of success."""
    monkeypatch.setattr(sys, "argv", ["demo.py", *ARGUMENTS, "--output", str(tmp_path)])

    def refuse() -> list[str]:
        assert demo.main() == 1
        said = " ".join(capsys.readouterr().out.split())  # without the terminal's line ends
        assert "swapkit trains within" not in said
        broken, *_ = said.partition("BROKEN: ")[2].partition(" limit peak resident")
        return broken.split(" BROKEN: ")

    return refuse


# Of the process that trains within the budget. Byte 0 is not in the text, so no loss depends on it.
ANOTHER_BIT = """
honest = demo.Training.step
def step(training, when_full=None):
    loss = honest(training, when_full)
    if training.steps_done == 4:
        training.model.embedding.weight.data.view(demo.torch.int32)[0, 0] ^= 1
    return loss
demo.Training.step = step
"""
ANOTHER_BUDGET = """
honest = demo.swapkit.budget
demo.swapkit.budget = lambda limit, *parts, **more: honest(int(1.2 * limit), *parts, **more)
"""
WRONG_COUNTS = ANOTHER_BUDGET + 'demo.swapkit.memory_stats = lambda: {"reserved_bytes.all.peak": 1}'
WITHIN = "MiB, not within its budget of 44.25 MiB"


@pytest.mark.promise("A3")
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (ANOTHER_BIT, [f"{LIMITED} is not bit-equal to {ALONE}"]),
        (
            ANOTHER_BUDGET,
            [f"{LIMITED} reserved 53.10 {WITHIN}", f"{LIMITED} had resident 53.10 {WITHIN}"],
        ),
        (WRONG_COUNTS, [f"{LIMITED} had resident 53.10 {WITHIN}"]),
    ],
    ids=["another bit", "another budget", "wrong counts"],
)
def test_demo_when_a_run_breaks_its_promise_then_refuses(
    fault: str,
    expected: list[str],
    results: Results,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[], list[str]],
) -> None:
    code = f"import sys\nfrom examples import demo\n{fault}\nsys.exit(demo.main())"
    monkeypatch.setattr(demo, "COMMAND", [sys.executable, "-c", code, "--run"])
    monkeypatch.setattr(demo, "ENVIRONMENT", demo.ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    execute = demo.execute

    def execute_limited(run: demo.Run) -> demo.Result:
        return execute(run) if run.policy else results[run.label]

    monkeypatch.setattr(demo, "execute", execute_limited)
    assert refuse() == expected


@pytest.mark.parametrize(
    ("label", "changes", "said"),
    [
        (LIMITED, {"losses": ["0x1p+2"]}, f"{LIMITED} is not bit-equal to {ALONE}"),
        ("plain", {"digests": ["0"]}, f"plain is not bit-equal to {ALONE}"),
        (LIMITED, {"stage": "search"}, f"{LIMITED} has no stable plan after"),
        (LIMITED, {"error": "ran out of memory in step 2: x"}, f"{LIMITED} ran out of memory"),
        (LIMITED, {"resident_bytes": None}, f"{LIMITED} had resident 0 B, not within its budget"),
        (TRIAL, {"error": "", "seconds": [1.0]}, f"{TRIAL} did not run out of memory"),
    ],
)
def test_demo_when_a_result_is_another_then_refuses(
    label: str,
    changes: dict[str, Any],
    said: str,
    results: Results,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[], list[str]],
) -> None:
    results[label] = replace(results[label], **changes)
    monkeypatch.setattr(demo, "execute", lambda run: results[run.label])
    (broken,) = refuse()
    assert broken.startswith(said)


def test_demo_when_a_run_crashes_then_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match='the run "plain" ended with status 3'):
        demo.execute(demo.Run(label="plain", size="tiny"))


@pytest.mark.parametrize("budget", ["", "0%", "ten", "60%,"])
def test_budget_when_it_is_none_then_a_usage_error(
    budget: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--budget", budget])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert "--budget" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.promise("A3")
def test_demo_when_it_sweeps_then_every_policy_holds_its_budget_on_both_links(
    tmp_path: Path,
) -> None:
    said, figures = run_demo(tmp_path, "--sweep", "40%")
    fast, slow = figures["sweep"]
    assert fast[:2] == ["as memory", "40%"]
    assert slow[0].endswith("/s")
    for row in (fast, slow):
        assert row[-1] == "yes"
        assert float(row[-2]) > 0, "what any plan could recover"
        times = row[2:6] + row[7:8]  # the policy recompute may not fit
        assert all(time.isdigit() for time in times)
    assert said.count("40%, link slow: ") == 6


SMAPS = b"""\
7f2a40000000-7f2a48000000 rw-p 00000000 00:00 0
Size:             131072 kB
Rss:               98304 kB
Pss:               98304 kB
VmFlags: rd wr mr mw me ac sd hg
7f2a48000000-7f2a80000000 ---p 00000000 00:00 0
Size:             917504 kB
Rss:                   8 kB
VmFlags: mr mw me nr sd
7ffc11b5e000-7ffc11b7f000 rw-p 00000000 00:00 0                          [stack]
Size:                132 kB
Rss:                  60 kB
"""


@pytest.mark.parametrize(
    ("ranges", "kib"),
    [
        ([], 0),
        ([(0x7F2A40000000, 1 << 30)], 98304 + 8),
        ([(0x7F2A40000000, 128 * MIB)], 98304),
        ([(0x7F2A48000000, 4096), (0x7FFC11B5D000, 4097)], 8 + 60),
        ([(0x7F2A80000000, 1 << 30)], 0),
    ],
)
def test_resident_bytes_when_ranges_are_given_then_of_their_mappings(
    ranges: list[tuple[int, int]], kib: int
) -> None:
    assert demo.resident_bytes(SMAPS, ranges) == kib * 1024
