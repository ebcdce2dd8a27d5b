"""Two processes that train by torch's pipeline schedules: each plans for what its stages do."""

from __future__ import annotations

import pytest

from tests.integration.pipelines_program import SCENARIOS, STEPS
from tests.support import ROOT
from tests.support.ranks import Scenarios

# Others are like each of these.
SLOW = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")
ON_RANKS = Scenarios(
    ROOT / "tests" / "integration" / "pipelines_program.py",
    tuple(name for name in SCENARIOS if name not in SLOW),
    SLOW,
)
found = ON_RANKS.found
NEAR = 0.02  # of a peak
# A rank that passes results to itself keeps those of the last step until it has new ones. The
# recorder did not see them, so they count to the end of the step; so does what a thread of gloo, on
# a loaded machine, has not given back yet.
NEAR_MIRRORED = 0.10
SETTLED = 3  # the last steps


@pytest.mark.parametrize("scenario", ON_RANKS.parameters())
def test_stages_when_they_train_within_budgets_then_the_same_bits(scenario: str) -> None:
    for rank in found(scenario):
        assert rank["same"]
        assert 0 < rank["peak"] <= rank["limit"]


@pytest.mark.parametrize("scenario", ON_RANKS.parameters())
def test_step_when_a_schedule_runs_it_then_its_peak_and_time_are_those_without_a_session(
    scenario: str,
) -> None:
    for rank in found(scenario):
        near = NEAR_MIRRORED if SCENARIOS[scenario].is_mirrored else NEAR
        assert abs(rank["traced peak"] / rank["plain peak"] - 1) <= near
        longest = max(rank["wall seconds"])
        assert 0 < rank["step seconds"] <= longest
        assert rank["traced seconds"] <= longest


@pytest.mark.parametrize("scenario", ON_RANKS.parameters())
def test_step_when_a_schedule_runs_it_then_the_trace_knows_its_stages(scenario: str) -> None:
    expected = SCENARIOS[scenario]
    places = [(rank["stages"], rank["of"], rank["ranks"]) for rank in found(scenario)]
    assert places == [(list(own), len(expected.layers), [0, 1]) for own in expected.stages]


@pytest.mark.parametrize("scenario", ON_RANKS.parameters())
def test_plans_when_stages_are_unlike_then_each_rank_has_one_for_its_own_budget(
    scenario: str,
) -> None:
    for number, rank in enumerate(found(scenario)):
        assert 0 < rank["planned"] <= rank["limit"]
        assert rank["moved"]
        assert rank["stage"] == "stable"
        assert len(rank["rescues"]) == STEPS
        assert sum(rank["rescues"][-SETTLED:]) <= sum(rank["rescues"]) // 10
        alone = f"rank {number} plans for its own budget: no other rank does the same"
        assert rank["messages"].count(alone) == 1
