"""Stages of a pipeline take less memory where they would wait for the slowest one anyway."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.integration.stage_memory_program import SAVED, SCENARIOS
from tests.support import ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "stage_memory_program.py"
SETTLED = 4  # the last steps


@functools.cache
def found() -> dict[str, list[dict[str, Any]]]:
    """Return what the program found for each scenario, by rank."""
    result: dict[str, list[dict[str, Any]]] = run_on_ranks(PROGRAM, ranks=4)
    return result


def waiting_ranks(name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the ranks that wait for a slow stage, each with its stage."""
    scenario = SCENARIOS[name]
    return [
        (stage, found()[name][rank])
        for ranks in scenario.ranks
        for stage, rank in enumerate(ranks)
        if scenario.waits(rank)
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_stages_when_they_train_within_budgets_then_the_same_bits(name: str) -> None:
    for rank in found()[name]:
        assert rank["same"]
        assert 0 < rank["peak"] <= rank["limit"]
        assert rank["stage"] == "stable"


@pytest.mark.parametrize("name", SCENARIOS)
def test_plans_when_another_stage_is_slower_then_they_take_less_memory_than_their_own(
    name: str,
) -> None:
    for _, rank in waiting_ranks(name):
        own, *_, last = rank["planned"]
        assert last <= SAVED * own
        assert rank["planned"][-SETTLED:] == [last] * SETTLED
        assert rank["rescues"] == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_plan_when_its_stage_is_the_slowest_then_it_stays(name: str) -> None:
    slowest = found()[name][0]
    count = len(SCENARIOS[name].ranks[0])
    (line,) = slowest["explained"]
    text = rf"stage 0 of {count}: the pipeline's step takes [0-9.]+ m?s \(this one\)"
    assert re.fullmatch(text, line)
    for stage, rank in waiting_ranks(name):
        (line,) = rank["explained"]
        assert re.fullmatch(
            rf"stage {stage} of {count}: the pipeline's step takes [0-9.]+ m?s \(stage 0\); this "
            r"stage's plan takes [0-9.]+ MiB instead of [0-9.]+ MiB for it",
            line,
        )


def test_pipelines_when_there_are_two_then_each_stage_hears_those_of_its_own() -> None:
    for ranks in SCENARIOS["two"].ranks:
        for stage, rank in enumerate(ranks):
            said = found()["two"][rank]
            assert said["ranks"] == list(ranks)
            (line,) = said["explained"]
            assert line.startswith(f"stage {stage} of 2: the pipeline's step takes ")
