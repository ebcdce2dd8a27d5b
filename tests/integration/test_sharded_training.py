"""Four processes that train one model: states on the host, and sessions for several parts."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "sharded_training_program.py"
WAYS = ("ddp", "zero", "fsdp", "fsdp foreach", "fsdp fused", "hsdp", "tp")


@functools.cache
def found() -> dict[str, list[dict[str, Any]]]:
    """Return what the program found for each way, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, list[dict[str, Any]]] = run_on_ranks(PROGRAM, folder, ranks=4)
    return result


@pytest.mark.parametrize("way", WAYS)
def test_training_when_states_are_offloaded_then_the_device_has_none_and_bits_are_the_same(
    way: str,
) -> None:
    assert sum(rank["plain"] for rank in found()[way]) > 1 << 20
    for rank in found()[way]:
        assert rank["same"]
        assert rank["bytes"] <= rank["plain"] / 100


def test_checkpoint_when_saved_on_two_ranks_then_four_load_the_same_bits() -> None:
    for rank in found()["checkpoints"]:
        assert rank["dicts"]
        assert rank["loaded"]
        assert rank["trained"]
        assert rank["bytes"] <= rank["plain"] / 100


@pytest.mark.parametrize("way", ["pipeline", "sharded parts"])
def test_session_when_a_rank_has_two_parts_then_it_plans_for_both_with_the_same_bits(
    way: str,
) -> None:
    for rank in found()[way]:
        assert rank["same"]
        assert rank["steps"] == 6
        assert rank["planned"]
        assert rank["is_within"]
        assert rank["parts"] == ["0", "1"]
        assert rank["microbatches"] == [0, 1, 2, 3]
        assert rank["explained"] == 2  # a line for each optimizer
