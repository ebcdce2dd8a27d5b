"""Sessions on two ranks choose `reshard_after_forward`: both at the same step, or none does."""

from __future__ import annotations

import pytest

from tests.support import ROOT
from tests.support.ranks import Scenarios

LAYERS = 4
SCENARIOS = Scenarios(
    ROOT / "tests" / "integration" / "resharding_program.py",
    ("kept", "tight", "freed", "silent"),
    ("beside", "evaluated", "failed"),
)
found = SCENARIOS.found
KEPT = "4 of 4 modules keep their gathered weights from forward to backward"
AS_SET = "reshard_after_forward: as the user has set it: "


@pytest.mark.parametrize("scenario", SCENARIOS.parameters())
def test_training_when_a_session_chooses_then_the_same_bits_within_the_budget(
    scenario: str,
) -> None:
    first, second = found(scenario)
    for rank in first, second:
        assert rank["same"]
        assert rank["held"] <= rank["limit"]
    assert first["frees"] == second["frees"]
    assert first["collectives"] == second["collectives"]


@pytest.mark.parametrize("scenario", SCENARIOS.parameters())
def test_settings_when_the_session_ends_then_they_are_the_users_again(scenario: str) -> None:
    for rank in found(scenario):
        assert rank["restored"] == [scenario != "freed"] * LAYERS


@pytest.mark.parametrize("scenario", SCENARIOS.parameters("kept", "beside", "failed"))
def test_steps_when_there_is_room_then_weights_stay_and_no_module_gathers_twice(
    scenario: str,
) -> None:
    gathers = 2 if scenario == "beside" else 1  # in each layer and step: its microbatches
    for rank in found(scenario):
        assert rank["frees"] == [False] * LAYERS
        spared = [
            before - now
            for before, now in zip(rank["plain collectives"], rank["collectives"], strict=False)
        ]
        switch = spared.index(gathers * LAYERS)
        assert set(spared[:switch]) == {0}
        assert set(spared[switch:]) == {gathers * LAYERS}
        assert KEPT in rank["explained"]


@pytest.mark.slow
def test_evaluations_when_weights_stay_then_they_see_those_after_the_optimizers_step() -> None:
    for rank in found("evaluated"):  # bits are compared above, kinds of parameters in the program
        assert rank["frees"] == [False] * LAYERS
        assert min(rank["collectives"]) < min(rank["plain collectives"])


def test_steps_when_kept_weights_would_displace_more_than_they_save_then_nothing_changes() -> None:
    for rank in found("tight"):
        assert rank["frees"] == [True] * LAYERS
        assert rank["collectives"] == rank["plain collectives"]
        assert f"{AS_SET}no other one is predicted to save 3% of a step's time" in rank["explained"]


def test_steps_when_kept_weights_leave_too_little_room_then_some_are_freed() -> None:
    for rank in found("freed"):
        assert sum(rank["frees"]) > 0
        assert rank["collectives"][-1] == rank["plain collectives"][-1] + sum(rank["frees"])
        assert "modules keep their gathered weights" in rank["explained"]


def test_ranks_when_one_of_them_does_not_choose_then_none_changes() -> None:
    first, second = found("silent")
    for rank in first, second:
        assert rank["frees"] == [True] * LAYERS
        assert rank["collectives"] == rank["plain collectives"]
    assert AS_SET in first["explained"]
    assert AS_SET not in second["explained"]


def test_saved_plan_when_modules_free_their_weights_instead_then_it_is_refused() -> None:
    why = (
        "the given plan is not followed: it was made for another reshard_after_forward, so that "
        "module 0 and 3 more would keep gathered weights after forward, and here would free them"
    )
    for rank in found("kept"):
        freeing, keeping = rank["given"]
        assert why in freeing
        assert "not followed" not in keeping
