"""FSDP2 and tensor parallelism on two ranks: traces have the memory that is there, plans fit."""

from __future__ import annotations

import pytest

from tests.support import ROOT
from tests.support.ranks import Scenarios

SCENARIOS = Scenarios(
    ROOT / "tests" / "integration" / "fsdp_program.py",
    ("resharded", "accumulated", "large", "tensor parallel", "failed"),
    ("kept", "by number", "half", "offloaded", "compiled", "large, less"),
)
found = SCENARIOS.found
RECORDED = SCENARIOS.parameters(
    *("resharded", "kept", "by number", "half", "offloaded", "accumulated", "large"),
    "tensor parallel",
)
TRAINED = SCENARIOS.parameters("large", "compiled", "large, less")
SETTLED = 6  # steps within which a session has its plan


@pytest.mark.parametrize("scenario", RECORDED)
def test_memory_when_weights_go_and_come_back_then_the_trace_has_what_the_pool_had(
    scenario: str,
) -> None:
    for rank in found(scenario):
        assert rank["problem"] == ""
        assert abs(rank["traced"] - rank["real"]) <= 0.02 * rank["real"]


@pytest.mark.parametrize("scenario", RECORDED)
def test_kinds_when_parameters_are_sharded_then_each_shard_has_its_own(scenario: str) -> None:
    for rank in found(scenario):
        kinds, shards = rank["kinds"], rank["shards"]
        assert kinds["state"] >= shards
        assert kinds["gradient"] >= shards
        assert 2 * shards <= kinds["optimizer state"] <= 2.1 * shards
        assert kinds["input"] < shards


@pytest.mark.parametrize("scenario", TRAINED)
def test_training_when_weights_are_gathered_then_planned_with_the_same_bits_within_the_budget(
    scenario: str,
) -> None:
    for rank in found(scenario):
        assert rank["same"]
        assert rank["held"] <= rank["limit"]
        assert rank["is_planned"], rank["explained"]
        assert rank["rescues"][-1] - rank["rescues"][SETTLED] <= 5


def test_text_when_memory_runs_out_then_it_names_shards_by_kind_and_the_rank() -> None:
    for number, rank in enumerate(found("failed")):
        assert f"out of memory on the CPU device (rank {number} of 2): " in rank["text"]
        for name, nbytes in rank["real"].items():
            assert f"  {name} (" in rank["text"]
            assert nbytes <= rank["held"][name] <= 1.05 * nbytes
