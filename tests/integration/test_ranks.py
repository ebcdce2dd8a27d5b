"""Two processes that train: alike, they plan for one budget; none waits for a silent one."""

from __future__ import annotations

import pytest

from swapkit._runtime.control.rank_agreement import PATIENCE_STEPS
from tests.support import ROOT
from tests.support.ranks import Scenarios

JOINED = ("joined", "one joined", "joined after plans")  # by sessions that began before the group
SCENARIOS = Scenarios(
    ROOT / "tests" / "integration" / "ranks_program.py",
    ("alone", "agreed", "unlike", "another path", "one joined"),
    ("evaluated", "joined", "joined after plans"),
)
found = SCENARIOS.found


@pytest.mark.parametrize("scenario", SCENARIOS.parameters())
def test_training_when_ranks_agree_or_not_then_the_same_bits_within_each_budget(
    scenario: str,
) -> None:
    for rank in found(scenario):
        assert rank["same"]
        assert rank.get("peak", 0) <= rank.get("limit", 0)


@pytest.mark.parametrize("scenario", SCENARIOS.parameters("agreed", *JOINED))
def test_plans_when_budgets_differ_then_both_are_for_the_smaller_one(scenario: str) -> None:
    ranks = found(scenario)
    limits = [rank["limit"] for rank in ranks]
    assert limits[0] > limits[1]
    for rank in ranks:
        assert 0 < rank["planned"] <= limits[1]
        assert rank["stages"][-1] == "stable"
        agreed = f"all 2 ranks agree: budget {limits[1] / 2**20:.2f} MiB (rank 1), floor "
        assert sum(text.startswith(agreed) for text in rank["messages"]) == 1


def test_plans_when_ranks_do_unlike_steps_then_each_plans_for_its_own_budget() -> None:
    ranks = found("unlike")
    for number, rank in enumerate(ranks):
        assert rank["stages"][-1] == "stable"
        alone = f"rank {number} plans for its own budget: no other rank does the same"
        assert rank["messages"].count(alone) == 1
    first, second = ranks
    assert 0 < first["planned"] <= first["limit"]
    assert first["limit"] < second["planned"] <= second["limit"]


@pytest.mark.slow
def test_plans_when_one_rank_has_one_more_session_open_then_those_that_train_agree() -> None:
    ranks = found("evaluated")
    smallest = min(rank["limit"] for rank in ranks)
    for rank in ranks:
        assert 0 < rank["planned"] <= smallest
        assert sum(text.startswith("all 2 ranks agree: ") for text in rank["messages"]) == 1


def test_plan_when_the_other_rank_has_no_session_then_one_is_made_after_a_while() -> None:
    alone, _ = found("alone")
    assert alone["stages"][:PATIENCE_STEPS] == ["warmup"] * PATIENCE_STEPS
    assert "warmup" not in alone["stages"][PATIENCE_STEPS:]
    assert alone["stages"][-1] == "stable"
    assert 0 < alone["planned"] <= alone["limit"]
    assert any("no budget has arrived from rank 1," in text for text in alone["messages"])


def test_session_when_only_one_rank_had_one_before_then_all_ranks_agree_again() -> None:
    alone, without = found("alone")
    assert alone["planned"]
    assert "planned" not in without
    for rank in found("agreed"):
        assert any(text.startswith("all 2 ranks agree: ") for text in rank["messages"])
        assert not any("no budget has arrived from" in text for text in rank["messages"])


def test_ranks_when_one_of_them_takes_another_path_then_both_plan_and_only_its_steps_deviate() -> (
    None
):
    for rank in found("another path"):
        assert rank["planned"]
        assert rank["stages"][-1] == "stable"
