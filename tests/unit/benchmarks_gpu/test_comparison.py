"""Which ways to train are run, in what order, with what limits; and the checks that follow."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.gpu import comparison, train
from benchmarks.gpu.comparison import Comparison, Figures, Results, Way
from benchmarks.gpu.context import Context
from benchmarks.gpu.process import Finished
from benchmarks.gpu.report import BROKEN, MET, MISSED, NOT_MEASURED, NOT_RUN, Report
from benchmarks.gpu.train import checks_of, row_of, steps_of
from benchmarks.gpu.ways import DRY_SPARE_BYTES, FIRST, limit_between, list_ways

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.configurations import Setup

MIB = 1 << 20
GOOD = {"outcome": "finished", "digest": "d", "loss": "l", "resident_bytes": 100 * MIB}
PEAKS = {"plain": 300, "recompute": 160, "prediction": 150, "selective": 200}


def make_context(tmp_path: Path, *, quick: bool = False, seconds: float = 1000.0) -> Context:
    return Context(
        report=Report(part="train_8b_8k"),
        device="cuda",
        quick=quick,
        dry=False,
        output=tmp_path,
        deadline=time.monotonic() + seconds,
    )


class Fake:
    """Stands for the processes; remembers what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outcomes: Figures) -> None:
        self.names: list[str] = []
        self.setups: dict[str, Setup] = {}
        self._outcomes = outcomes

        def run(_self: Comparison, way: Way, setup: Setup) -> Figures:
            self.names.append(way.name)
            self.setups[way.name] = setup
            return self._figures(way.name, setup)

        monkeypatch.setattr(comparison.Comparison, "_run_process", run)

    def _figures(self, name: str, setup: Setup) -> Figures:
        if name in self._outcomes:
            return self._outcomes[name]
        figures: dict[str, Any] = GOOD | {"steps_ms": [10.0, 11.0, 12.0], "seconds": 1.0}
        figures["in_use_peak_bytes"] = PEAKS.get(name, 120) * MIB
        if setup.limit_bytes:
            figures["budget_bytes"] = setup.limit_bytes
            figures["session_peak_bytes"] = setup.limit_bytes
        if name == "overhead":
            figures["overhead_ratio"] = 1.004
        return figures


def run_all(context: Context) -> None:
    train.run(context, "8b_8k")


def test_ways_when_run_then_limits_follow_from_what_others_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    run_all(make_context(tmp_path))
    limits = {name: setup.limit_bytes for name, setup in fake.setups.items()}
    assert limits["swapkit_at_recompute"] == 160 * MIB
    assert limits["native_at_recompute"] == 160 * MIB
    assert fake.setups["native_at_recompute"].native
    assert limits["swapkit_at_selective"] == 200 * MIB
    assert limits["swapkit_40"] == 180 * MIB  # 100 stay, 40 % of the other 200
    assert limits["swapkit_80"] == 260 * MIB
    assert limits["swap_everything"] == int(150 * MIB * 1.02)
    assert fake.setups["swap_everything"].offload
    assert limits["overhead"] == 600 * MIB
    assert fake.setups["compile_0.3"].share == 0.3
    assert limits["plain"] == limits["recompute"] == limits["pool"] == 0


def test_limits_when_a_tiny_model_is_tried_on_a_gpu_then_there_is_room_for_pieces_of_granules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    train.run(dataclasses.replace(make_context(tmp_path), dry=True), "tiny")
    assert fake.setups["swapkit_at_recompute"].limit_bytes == 160 * MIB + DRY_SPARE_BYTES
    assert fake.setups["swapkit_40"].limit_bytes == 180 * MIB + DRY_SPARE_BYTES


def test_ways_when_run_dry_then_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    context = dataclasses.replace(make_context(tmp_path), dry=True)
    train.run(context, "tiny")
    listed = [way.name for way in list_ways(context, "tiny")]
    assert fake.names == listed
    assert fake.setups["overhead"].rounds == 1


def test_ways_when_run_then_the_key_ones_twice_in_turns_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    run_all(make_context(tmp_path))
    key = ["plain", "pool", "recompute", "swapkit_at_recompute", "swapkit_40"]
    once = ["prediction", "swap_everything", "overhead"]
    repeated = ["swap_everything", *reversed(key)]
    assert fake.names[: len(key) + len(once) + len(repeated)] == [*key, *once, *repeated]
    assert fake.names.count("compile_0.5") == 1
    assert fake.names.count("save_on_cpu") == 2


def test_ways_when_quick_then_only_the_key_ones_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    context = make_context(tmp_path, quick=True)
    run_all(context)
    assert len(fake.names) == len(set(fake.names)) == 8
    assert fake.setups["plain"].timed_steps == 4


def test_ways_when_first_then_the_most_worth_first_and_all_rows_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    context = dataclasses.replace(make_context(tmp_path, quick=True), first=True)
    run_all(context)
    assert tuple(fake.names) == FIRST
    assert fake.setups["swapkit_at_recompute"].limit_bytes == PEAKS["recompute"] * MIB
    for rows in context.report.tables.values():
        assert set(rows) == {way.name for way in list_ways(context, "8b_8k")}


def test_rows_when_steps_were_looked_at_then_each_is_per_step_beside_plain() -> None:
    results = make_results(
        swapkit_40={"steps_ms": [15.0], "step_maps": 0.5, "kernels": 130, "recorded_ms": 66.0}
    )
    results.runs["plain"][0] |= {"kernels": 100, "kernel_ms": 60.0}
    row = steps_of(results, "swapkit_40")
    assert row["step_maps"] == 0.5
    assert row["repeated_kernels"] == 30
    assert row["recorded_ratio"] == 1.1
    assert row["step_rescues"] is None
    assert set(row) == set(steps_of(Results(), "swapkit_40"))


def test_ways_when_time_is_short_then_the_rest_is_said_not_to_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    context = make_context(tmp_path, seconds=comparison.MARGIN_SECONDS)
    run_all(context)
    assert fake.names == []
    rows = context.report.tables["training 8b_8k; step ratio: to plain"]
    assert {row["outcome"] for row in rows.values()} == {NOT_RUN}
    assert len(rows) == len(list_ways(context, "8b_8k"))
    assert "not run" in context.report.notes[0]


def test_way_when_it_failed_then_not_tried_again_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch, swapkit_at_recompute={"outcome": "failed: RuntimeError: x"})
    context = make_context(tmp_path)
    run_all(context)
    assert fake.names.count("swapkit_at_recompute") == 1
    checks = {check.name: check.verdict for check in context.report.checks.values()}
    assert checks["failures"] == BROKEN
    assert checks["fits_swapkit_at_recompute"] == MISSED
    assert "swapkit_at_recompute: failed: RuntimeError: x" in context.report.notes


def test_way_when_it_runs_out_of_memory_then_a_row_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake(
        monkeypatch,
        swapkit_20={"outcome": "out of memory"},
        save_on_cpu={"outcome": "out of memory"},
    )
    context = make_context(tmp_path)
    run_all(context)
    rows = context.report.tables["training 8b_8k; step ratio: to plain"]
    assert rows["swapkit_20"]["outcome"] == rows["save_on_cpu"]["outcome"] == "out of memory"
    assert rows["swapkit_20"]["step_ms"] is None
    assert context.report.checks["failures"].verdict == MET


def test_way_when_its_time_is_up_then_neither_a_failure_nor_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = {"outcome": comparison.OUT_OF_TIME, "seconds": 9.0}
    Fake(monkeypatch, swapkit_at_recompute=stopped, swapkit_40=stopped)
    context = make_context(tmp_path)
    run_all(context)
    checks = {check.name: check.verdict for check in context.report.checks.values()}
    assert checks["failures"] == MET
    assert checks["fits_swapkit_at_recompute"] == checks["at_recompute"] == NOT_MEASURED


@pytest.mark.parametrize(
    ("left", "outcome"), [(3.0, comparison.OUT_OF_TIME), (1000.0, "failed: stopped after 1 s")]
)
def test_process_when_stopped_then_the_parts_time_or_the_process_is_to_blame(
    left: float, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Finished(status=-15, timed_out=True, seconds=1.0, log=tmp_path / "log")
    monkeypatch.setattr(comparison, "run_process", lambda *_words, **_options: stopped)
    context = make_context(tmp_path, seconds=left)
    ways = list_ways(context, "8b_8k")
    compared = Comparison(context, ways, lambda _results: None)
    setup = ways[0].setup(Results())
    assert setup is not None
    assert compared._run_process(ways[0], setup)["outcome"] == outcome


def make_results(**runs: dict[str, Any]) -> Results:
    results = Results()
    results.add("plain", GOOD | {"steps_ms": [10.0], "in_use_peak_bytes": 300 * MIB})
    results.add("recompute", GOOD | {"steps_ms": [13.0], "in_use_peak_bytes": 160 * MIB})
    for name, run in runs.items():
        results.add(name, GOOD | run)
    return results


def verdicts(results: Results, tmp_path: Path, *, targets: bool = True) -> dict[str, str]:
    ways = list_ways(make_context(tmp_path), "8b_8k")
    checks = checks_of(results, ways, dry=False, targets=targets)
    return {check.name: check.verdict for check in checks}


def test_checks_when_all_is_well_then_met(tmp_path: Path) -> None:
    budget = {"budget_bytes": 160 * MIB, "session_peak_bytes": 159 * MIB}
    results = make_results(
        swapkit_at_recompute={"steps_ms": [12.0], **budget},
        swap_everything={"steps_ms": [14.0], "budget_bytes": 153, "session_peak_bytes": 152},
        prediction={"steps_ms": [50.0], "in_use_peak_bytes": 150},
        overhead={"steps_ms": [10.0], "overhead_ratio": 1.005},
    )
    assert set(verdicts(results, tmp_path).values()) == {MET}
    assert "at_recompute" not in verdicts(results, tmp_path, targets=False)


def test_checks_when_targets_are_missed_and_promises_broken_then_said(tmp_path: Path) -> None:
    results = make_results(
        swapkit_at_recompute={
            "steps_ms": [14.0],
            "digest": "other",
            "budget_bytes": 160,
            "session_peak_bytes": 161,
        },
        overhead={"steps_ms": [10.0], "overhead_ratio": 1.02},
        swapkit_60={"outcome": "out of memory"},
    )
    found = verdicts(results, tmp_path)
    assert found["at_recompute"] == found["overhead"] == MISSED
    assert found["bits_swapkit_at_recompute"] == found["budget_swapkit_at_recompute"] == BROKEN
    assert found["failures"] == BROKEN
    assert found["prediction"] == NOT_MEASURED


def test_row_when_made_then_ratios_are_to_plain() -> None:
    results = make_results(swapkit_40={"steps_ms": [15.0, 20.0], "rescues": 7})
    row = row_of(results, "swapkit_40")
    assert row["step_ratio"] == 1.75
    assert row["bits"] == "equal"
    assert row["rescues"] == 7
    assert row_of(Results(), "plain")["outcome"] == NOT_RUN


def test_limit_when_plain_has_no_counters_then_the_pool_says_the_total() -> None:
    results = Results()
    results.add("plain", GOOD | {"in_use_peak_bytes": None})
    assert limit_between(results, 0.5) is None
    results.add("pool", GOOD | {"in_use_peak_bytes": 200 * MIB})
    assert limit_between(results, 0.5) == 150 * MIB
