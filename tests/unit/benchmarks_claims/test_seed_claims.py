"""The table of the seeds' claims: gains in their form, and no more than is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks._planner_models import SHAPES
from benchmarks.pipelines import claim_stages
from benchmarks.pipelines.claim_stages import Stage, simulate_claim
from benchmarks.seed_claims import CLAIMS, Claim, conclude, gain_of, print_table, show_gain

TINY = Stage(shape=SHAPES["tiny"], layers=2, tokens=1024, batch=2)
LINK = 50e9


def claim(gain: float) -> Claim:
    return Claim(key="c", seed="S9", setting="a setting", gain=gain, policy="auto")


def test_claims_when_listed_then_keys_differ_and_stages_exist() -> None:
    assert len({each.key for each in CLAIMS}) == len(CLAIMS)
    for each in CLAIMS:
        assert not each.stage or isinstance(getattr(claim_stages, each.stage), Stage)
    assert [each.gain for each in CLAIMS if each.key.startswith("s3_")] == [
        0.1368, 0.1368, 0.1417, 0.1465,
    ]  # fmt: skip


def test_gain_when_computed_then_in_throughput_and_round_by_round() -> None:
    assert gain_of([1.3, 2.6, 1.3], [1.0, 2.0, 9.0]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("gain", "most", "reached", "word"),
    [
        (0.15, 0.3, True, "yes"),
        (0.1, 0.3, False, "no"),
        (0.02, 0.05, False, "no: not possible here"),
        (None, 0.3, False, "no"),
        (1.33, 0.396, False, "measurement invalid"),
        (0.31, 0.3, True, "yes"),  # as two runs of the same differ
    ],
)
def test_table_when_printed_then_says_whether_the_claim_is_reached(
    gain: float | None, most: float, reached: bool, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = conclude([claim(0.14)], {"c_gain": gain, "c_most": most})
    assert figures["c_reached"] is reached
    assert figures["c_claim"] == 0.14
    print_table([claim(0.14)], figures)
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("S9")
    assert f"  {word}  " in row
    assert row.endswith("measured")


@pytest.mark.promise("D9")
@pytest.mark.parametrize(
    "stage",
    [
        TINY,
        replace(TINY, schedule="1f1b", stages=4, microbatches=4),
        replace(TINY, layers=1, schedule="interleaved", stages=4, microbatches=4, chunks=2),
    ],
)
def test_claim_when_simulated_then_faster_than_full_recompute_at_the_same_memory(
    stage: Stage,
) -> None:
    found = simulate_claim(stage, policy="auto", spare=0.3, link_bytes_per_s=LINK)
    assert found["budget_bytes"] is not None
    assert found["gain"] is not None
    assert found["most"] is not None
    assert 0 < found["gain"] <= found["most"] + 1e-9
    assert 0.1 < found["most"] < 0.5


def test_claim_when_no_plan_fits_then_said() -> None:
    found = simulate_claim(TINY, policy="swap", spare=-2.0, link_bytes_per_s=LINK)
    assert found["gain"] is None
    assert show_gain(found["gain"]) == "no plan fits"
