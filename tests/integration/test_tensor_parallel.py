"""Regions on two ranks: which collectives run again in backward, and activations kept in slices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import MIB, ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "tensor_parallel_program.py"
ACTIVATION_BYTES = 2 * MIB
REGIONS = 2


def found() -> dict[str, Any]:
    """Return what the program found; it compares the gradients itself, bit for bit."""
    result: dict[str, Any] = run_on_ranks(PROGRAM)
    return result


@pytest.mark.promise("B3")
@pytest.mark.promise("B6")
@pytest.mark.parametrize(
    ("setting", "reductions", "gathers"),
    [
        ("all again", 2, 2),
        ("activations kept", 0, 2),
        ("weights kept", 2, 0),
        ("all kept", 0, 0),
        ("kept in one mlp", 1, 2),
        ("kept but in one mlp", 1, 2),
        ("kept in one layer", 1, 1),
    ],
)
def test_collectives_when_a_setting_keeps_some_then_only_the_others_run_again(
    setting: str, reductions: int, gathers: int
) -> None:
    counts = found()["functional"][setting]
    assert (counts["all_reduce"], counts["all_gather"]) == (reductions, gathers)
    assert counts["reduce_scatter"] == 0


@pytest.mark.promise("B3")
@pytest.mark.promise("B6")
@pytest.mark.parametrize(
    ("document", "reductions", "gathers"),
    [
        ("full", 2, 0),
        ("full, weights gathered again", 2, 2),
        ("full, activations kept", 0, 0),
        ("full, kept in one mlp", 1, 0),
        ("mlps", 2, 0),
        ("mlps, kept", 0, 0),
        ("mlps, kept but in one", 1, 0),
        ("sliced", 2, 2),  # the slices themselves are gathered
    ],
)
def test_collectives_when_a_document_says_so_then_they_run_again_or_are_kept(
    document: str, reductions: int, gathers: int
) -> None:
    counts = found()["functional"][f"configured: {document}"]
    assert (counts["all_reduce"], counts["all_gather"]) == (reductions, gathers)


@pytest.mark.promise("B6")
def test_activations_when_a_document_slices_them_then_half_their_bytes_are_kept() -> None:
    functional = found()["functional"]
    whole, sliced = (functional[f"configured: {name}"]["held"] for name in ("full", "sliced"))
    assert abs(whole - sliced - REGIONS * ACTIVATION_BYTES // 2) < MIB // 16


@pytest.mark.promise("B6")
def test_activations_when_sliced_over_two_ranks_then_half_their_bytes_are_kept() -> None:
    functional = found()["functional"]
    whole, sliced = functional["all again"]["held"], functional["sliced"]["held"]
    slack = MIB // 16
    assert REGIONS * ACTIVATION_BYTES <= whole < REGIONS * ACTIVATION_BYTES + slack
    assert REGIONS * ACTIVATION_BYTES // 2 <= sliced < REGIONS * ACTIVATION_BYTES // 2 + slack
    assert functional["sliced"]["all_gather"] == functional["all again"]["all_gather"] + REGIONS


@pytest.mark.parametrize(
    ("setting", "again"), [("again", 1), ("kept", 0), ("kept, products saved", 0)]
)
def test_collectives_when_dtensor_calls_them_then_they_follow_the_setting(
    setting: str, again: int
) -> None:
    assert found()["dtensor"][setting] == again
