"""The sweep's figures, and what it finds wrong."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from swapkit.demo.messages import Finished, RunKind
from swapkit.demo.sweep import FULL_RECOMPUTE, NO_LIMIT, POLICIES, Point
from swapkit.demo.sweep_table import point_problems, show_sweep
from tests.unit.demo.test_results import FAILURE, make

FREE_SECONDS, FULL_SECONDS = (1.0, 1.1, 1.2), (1.4, 1.5, 1.6)


def point(**seconds: tuple[float, ...]) -> Point:
    results = {
        NO_LIMIT: replace(make("none", RunKind.PLAIN), seconds=FREE_SECONDS),
        FULL_RECOMPUTE: replace(make("full", RunKind.RECOMPUTE), seconds=FULL_SECONDS),
    }
    for policy in POLICIES:
        made = make(policy, RunKind.SWAPKIT)
        finished = replace(made.finished, bound_share=1.04)
        results[policy] = replace(
            made, finished=finished, seconds=seconds.get(policy, FREE_SECONDS)
        )
    return Point(share=0.45, bytes_per_s=0.0, results=results)


def test_recovered_when_as_fast_as_no_limit_then_all() -> None:
    assert point().recovered("auto") == pytest.approx(1.0)


def test_recovered_when_as_slow_as_full_recompute_then_nothing() -> None:
    assert point(auto=FULL_SECONDS).recovered("auto") == pytest.approx(0.0)


def test_recovered_when_out_of_memory_then_unknown() -> None:
    assert point(swap=()).recovered("swap") is None


def test_possible_when_the_bound_is_known_then_its_share() -> None:
    assert point().possible() == pytest.approx(1 - 0.044 / 0.4)


def test_problems_when_all_is_well_then_none() -> None:
    assert not list(point_problems(point()))


@pytest.mark.parametrize(
    ("policy", "changes", "said"),
    [
        ("swap", {"losses": ("0x1p+2", "0x1p+3")}, "swap is not bit-equal to none"),
        ("auto", {"budget_bytes": 599 << 20}, "auto reserved 600.00 MiB, more than"),
        ("auto", {"finished": Finished(digest="abc", stage="search")}, "auto has no stable plan"),
    ],
)
def test_problems_when_a_run_is_wrong_then_said(
    policy: str, changes: dict[str, object], said: str
) -> None:
    made = point()
    made.results[policy] = replace(made.results[policy], **changes)  # type: ignore[arg-type]
    found = list(point_problems(made))
    assert said in found[0]


def test_table_when_shown_then_has_every_policy_and_what_does_not_fit() -> None:
    made = point()
    made.results["recompute"] = replace(made.results["recompute"], out_of_memory=FAILURE)
    console = Console(width=110, record=True, file=io.StringIO())
    show_sweep(console, (made,))
    shown = console.export_text()
    assert "OOM" in shown
    assert "45%" in shown
    for heading in ("no limit", "recompute", *POLICIES):
        assert heading in shown
