"""Two ranks, one of which fails: what the other one says, instead of waiting for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.rank_failures_program import BUDGET, FAILS_AT, SCENARIOS, STEPS
from tests.support import ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "rank_failures_program.py"


def found(scenario: str) -> list[dict[str, Any]]:
    """Return what each rank raised. A rank that waits for a timeout of its own never returns."""
    ranks: list[dict[str, Any]] = run_on_ranks(PROGRAM)[scenario]
    return ranks


@pytest.mark.parametrize(
    "scenario", ["caught", "distributed", "uncaught", "checked", "checked first"]
)
def test_rank_when_another_is_out_of_memory_then_it_leaves_the_collective_and_names_it(
    scenario: str,
) -> None:
    fails = SCENARIOS[scenario].fails
    waiting = found(scenario)[1 - fails]
    assert waiting["error"] == "RankOutOfMemory"
    assert waiting["rank"] == fails
    assert waiting["budget"] == BUDGET
    assert waiting["cause"] == "RuntimeError"  # of the collective
    assert f"rank {fails} ran out of memory within its budget of 64.00 MiB" in waiting["text"]
    assert f"this is rank {1 - fails}" in waiting["text"]
    assert "128.00 MiB" not in waiting["text"]
    assert "512.00 MiB (536870912 bytes) requested" in waiting["text"]
    assert waiting["limit"] == 0  # the session has ended


def test_rank_when_another_is_out_of_memory_while_it_computes_then_it_stops_by_itself() -> None:
    computing, _ = found("computing")
    assert computing["error"] == "RankOutOfMemory"
    assert computing["rank"] == 1
    assert computing["cause"] == "NoneType"
    assert computing["steps"] > FAILS_AT


def test_rank_when_it_is_out_of_memory_and_goes_on_then_its_next_collective_says_why() -> None:
    for scenario in "caught", "distributed":
        failed = found(scenario)[1]
        assert "requested" in failed["caught"]
        assert failed["error"] == "RankOutOfMemory"
        assert failed["rank"] == 1
        assert failed["text"].startswith("this rank ran out of memory ")


def test_rank_when_it_is_out_of_memory_and_stops_then_it_raises_torchs_own_error() -> None:
    assert found("uncaught")[1]["error"] == "OutOfMemoryError"


def test_ranks_when_none_asked_to_fail_together_then_they_go_on_and_the_text_says_how_to() -> None:
    ranks = found("usual")
    for rank in ranks:
        assert rank["error"] == ""
        assert rank["steps"] == STEPS
    assert "on_oom='all' makes them fail at once" in ranks[1]["caught"]
    assert "on_oom" not in found("caught")[1]["caught"]


def test_rank_when_it_does_not_listen_then_its_collective_ends_with_torchs_error() -> None:
    deaf, failed = found("unheard")
    assert deaf["error"] == "RuntimeError"
    assert "Connection" in deaf["text"]
    assert failed["error"] == "RankOutOfMemory"


def test_rank_when_another_dies_then_torchs_error_stays_as_it_is() -> None:
    (left,) = found("dead")
    assert left["error"] == "RuntimeError"
    assert "Connection" in left["text"]
    assert left["limit"] == 0
