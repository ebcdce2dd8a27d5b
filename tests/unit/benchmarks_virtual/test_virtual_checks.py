"""What is aimed at on a virtual GPU, and what the rows say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.comparison import Results
from benchmarks.gpu.report import BROKEN, MET, MISSED, NOT_MEASURED
from benchmarks.virtual.table import checks_of, counts_of, link_ratio, times_of
from benchmarks.virtual.ways import BUDGETS

GIB = 1 << 30
STABLE: dict[str, Any] = {
    **dict.fromkeys(("step_maps", "step_unmaps", "step_rescues", "step_replans"), 0.0),
    "plan_changes": 0,
    "planned_bytes": float(GIB),
    "step_out_bytes": float(GIB),
    "step_in_bytes": float(GIB),
    "recorded_ms": 66.0,
    "true_ms": 66.5,
}
LINK = {"link_out_gb_per_s": 50.0, "link_in_gb_per_s": 50.0}


def make_results(**changes: dict[str, Any]) -> Results:
    results = Results()
    runs: dict[str, dict[str, Any]] = {
        "plain": {"steps_ms": [70.0], "host_free_ms": 70.0, "kernels": 1000.0},
        "recompute": {"steps_ms": [86.0]},
        "offload": {"step_out_bytes": 5e9, "step_in_bytes": 5e9, "steps_ms": [210.0], **LINK},
        "auto_at_recompute": STABLE | {"steps_ms": [77.0], "kernels": 1090.0},
        "auto_40": STABLE | {"steps_ms": [75.0], "host_free_ms": 75.0},
        "auto_20": STABLE | {"steps_ms": [80.0]},
        "swap_at_recompute": {"steps_ms": [200.0]},
        "recompute_at_recompute": {"steps_ms": [85.0]},
    }
    for name in {**runs, **changes}:
        figures = {"outcome": "finished", "steps_ms": [100.0]} | runs.get(name, {})
        results.add(name, figures | changes.get(name, {}))
    return results


def verdicts(results: Results, *, has_host: bool = False) -> dict[str, str]:
    checks = checks_of(results, list(results.runs), has_host=has_host)
    return {check.name: check.verdict for check in checks}


def test_checks_when_all_is_well_then_met_and_those_without_rivals_not_measured() -> None:
    found = verdicts(make_results())
    unmeasured = {name for name, verdict in found.items() if verdict == NOT_MEASURED}
    with_host = {f"step_auto_{budget}" for budget in BUDGETS}
    assert unmeasured == {"best_auto_40", "best_auto_20"} | with_host
    assert {found[name] for name in found if name not in unmeasured} == {MET}


def test_checks_when_the_host_takes_time_then_steps_with_it_are_looked_at() -> None:
    found = verdicts(make_results(), has_host=True)
    unmeasured = {name for name, verdict in found.items() if verdict == NOT_MEASURED}
    assert unmeasured == {
        f"{what}_auto_{budget}" for what in ("free", "best") for budget in BUDGETS
    }
    assert {found[name] for name in found if name not in unmeasured} == {MET}
    slow = make_results(auto_at_recompute={"steps_ms": [78.0]}, auto_40={"steps_ms": [81.0]})
    found = verdicts(slow, has_host=True)
    assert found["step_auto_at_recompute"] == found["step_auto_40"] == MISSED


def test_checks_when_nothing_was_run_then_the_same_names() -> None:
    nothing = verdicts(Results())
    assert set(nothing) == set(verdicts(make_results()))
    assert nothing.pop("failures") == MET
    assert set(nothing.values()) == {NOT_MEASURED}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("changed", "check"),
    [
        ({"step_maps": 0.1}, "maps"),
        ({"step_unmaps": 1.0}, "maps"),
        ({"step_rescues": 0.01}, "rescues"),
        ({"step_replans": 0.01}, "replans"),
        ({"plan_changes": 1}, "changes"),
        ({"step_in_bytes": GIB - 1.0}, "bytes"),
        ({"planned_bytes": 0.0}, "bytes"),
        ({"recorded_ms": 74.0}, "recorded"),
        ({"recorded_ms": 60.0}, "recorded"),
        ({"steps_ms": [90.0]}, "free"),
    ],
)
def test_checks_when_a_stable_step_does_more_then_missed(
    changed: dict[str, Any], check: str, budget: str
) -> None:
    found = verdicts(make_results(**{f"auto_{budget}": changed}))
    assert found[f"{check}_auto_{budget}"] == MISSED


def test_checks_when_another_policy_is_faster_then_missed() -> None:
    found = verdicts(make_results(recompute_at_recompute={"steps_ms": [75.0]}))
    assert found["best_auto_at_recompute"] == MISSED
    found = verdicts(make_results(swap_40={"steps_ms": [74.0]}))
    assert found["best_auto_40"] == MET


def test_checks_when_a_way_of_ours_fails_then_broken_and_a_rival_may() -> None:
    found = verdicts(make_results(auto_20={"outcome": "failed: RuntimeError: x"}))
    assert found["failures"] == BROKEN
    assert found["free_auto_20"] == NOT_MEASURED
    found = verdicts(make_results(trl={"outcome": "failed: RuntimeError: x"}))
    assert found["failures"] == MET


def test_link_when_bytes_go_out_and_back_then_one_after_the_other() -> None:
    results = make_results()
    assert link_ratio(results, "offload") == pytest.approx(1.05)
    assert link_ratio(results, "plain") is None
    assert verdicts(make_results(offload={"steps_ms": [217.0]}))["offload"] == MISSED


def test_rows_when_made_then_beside_plain_and_with_the_same_columns() -> None:
    results = make_results(auto_40={"steps_ms": [140.0], "busy_ms": 75.0, "mean_step_ms": 150.0})
    times = times_of(results, "auto_40")
    assert times["step_ratio"] == 2.0
    assert times["busy_ratio"] == 0.5
    assert times["host_free_ratio"] == pytest.approx(75 / 70)
    counts = counts_of(results, "auto_at_recompute")
    assert counts["repeated_kernels"] == 90
    assert counts["recorded_ratio"] == pytest.approx(66 / 66.5)
    assert counts["step_out_bytes"] == counts["planned_bytes"] == GIB
    assert set(times_of(Results(), "auto_40")) == set(times)
    assert set(counts_of(Results(), "auto_40")) == set(counts)


def lora_verdicts(**changed: Any) -> dict[str, str]:
    figures = STABLE | {"steps_ms": [72.0], "predicted_ms": 72.5, "bound_ms": 71.0} | changed
    results = make_results(auto_card=figures)
    checks = checks_of(results, ["plain", "auto_card"], has_host=True, shape="7b_lora")
    return {check.name: check.verdict for check in checks}


def test_checks_when_weights_are_frozen_then_beside_unlimited_memory_and_the_bound() -> None:
    assert set(lora_verdicts().values()) == {MET, NOT_MEASURED}
    assert lora_verdicts(steps_ms=[75.0])["step_auto_card"] == MISSED
    assert lora_verdicts(steps_ms=[75.0])["predicted_auto_card"] == MISSED
    # A link that is too slow for frozen weights to stream unseen is not the plan's fault.
    slow = lora_verdicts(steps_ms=[102.0], bound_ms=100.0, predicted_ms=101.0)
    assert slow["step_auto_card"] == slow["predicted_auto_card"] == MET
    assert lora_verdicts(step_rescues=1.0)["rescues_auto_card"] == MISSED


def test_rows_when_a_part_of_the_layers_is_trained_then_beside_plain_with_as_many() -> None:
    results = make_results(plain_part={"steps_ms": [10.0]}, ramtorch_part={"steps_ms": [30.0]})
    assert times_of(results, "ramtorch_part")["step_ratio"] == 3.0
