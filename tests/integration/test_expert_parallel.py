"""A mixture of experts on two ranks trains as without a session: the same bits and collectives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "expert_parallel_program.py"
EXCHANGES = ("functional", "in place")
SHARES = (0.9, 0.95, 1.0)


def check(found: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """Both ranks must have trained as without a session."""
    ranks = found[name]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["same"]
        assert rank["collectives"] == rank["plainly"] > 0
        assert rank["planned"] > 0
    return ranks


@pytest.mark.promise("A3")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_experts_when_a_plan_recomputes_all_that_it_may_then_same_bits_and_collectives(
    exchange: str,
) -> None:
    ranks = check(run_on_ranks(PROGRAM, "all"), f"{exchange}, all, 2.0")
    assert all(rank["recomputed"] > 0 for rank in ranks)


@pytest.mark.slow
@pytest.mark.promise("A3")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("policy", ["auto", "recompute"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_experts_when_sessions_plan_then_same_bits_and_collectives(
    exchange: str, policy: str, share: float
) -> None:
    check(run_on_ranks(PROGRAM, "auto", "recompute"), f"{exchange}, {policy}, {share}")
