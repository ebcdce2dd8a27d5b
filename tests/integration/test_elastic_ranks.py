"""A saved plan, and then more ranks, and fewer: each run plans for the ranks that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import ROOT
from tests.support.ranks import run_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = ROOT / "tests" / "integration" / "elastic_ranks_program.py"
COUNTS = (2, 4, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """What became of the sessions of each run, by its number of ranks."""
    folder: Path = tmp_path_factory.mktemp("plan")
    return {count: run_on_ranks(PROGRAM, str(folder), ranks=count) for count in COUNTS}


@pytest.mark.parametrize("count", COUNTS)
def test_training_when_the_number_of_ranks_changes_then_the_same_bits_within_the_budget(
    runs: dict[int, dict[str, list[dict[str, Any]]]], count: int
) -> None:
    sessions = [session for each in runs[count].values() for session in each]
    assert len(runs[count]["given"]) == count
    for session in sessions:
        assert session["same"]
        assert session["peak"] <= session["limit"]
        assert session["ranks"] == count
        assert session["planned"]
        assert session["last"] == "stable"


def test_plan_when_as_many_ranks_train_as_made_it_then_followed_from_the_first_step(
    runs: dict[int, dict[str, list[dict[str, Any]]]],
) -> None:
    for session in runs[2]["given"]:
        assert session["first"] == "stable"
        assert session["refusals"] == []
        assert "is not followed" not in session["explained"]


@pytest.mark.parametrize(("count", "words"), [(4, "4 ranks train"), (1, "one rank trains")])
def test_plan_when_another_number_of_ranks_trains_then_each_plans_anew_and_says_so_once(
    runs: dict[int, dict[str, list[dict[str, Any]]]], count: int, words: str
) -> None:
    said = (
        f"the given plan is not followed: it was made for 2 ranks, and {words} here. "
        "The session plans anew"
    )
    for session in runs[count]["given"]:
        assert session["first"] == "warmup"
        assert session["refusals"] == [said]
        assert said in session["explained"]
