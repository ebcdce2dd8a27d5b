"""What a recorded step says of other ranks: collectives, waits for them, a pipeline's jobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.recorded_ranks_program import (
    LATE_SECONDS,
    LAYERS,
    MICROBATCHES,
)
from tests.support import ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "recorded_ranks_program.py"
WAIT = "swapkit.wait"


def found(name: str) -> list[dict[str, Any]]:
    """Return what each rank has in the trace of a step."""
    ranks: list[dict[str, Any]] = run_on_ranks(PROGRAM)[name]
    return ranks


@pytest.mark.parametrize(
    ("step", "operators"),
    [
        ("reduce_late", ["c10d.allreduce_.default"] * 2),
        ("receive_late", ["c10d.recv_.default", "c10d.send.default"]),
    ],
)
def test_step_when_another_rank_is_late_then_the_wait_is_an_operator_of_its_own(
    step: str, operators: list[str]
) -> None:
    waiting, late = found(step)
    assert waiting["waited"] > LATE_SECONDS / 2 > late["waited"]
    for rank, operator in zip((waiting, late), operators, strict=True):
        assert rank["operators"][operator] == 1
        assert rank["operators"][WAIT] == 1
        assert rank["phases"] == ["forward"]


@pytest.mark.parametrize("step", ["wait_elsewhere", "fail"])
def test_step_when_a_wait_fails_or_is_another_threads_then_it_is_not_of_the_step(step: str) -> None:
    for rank in found(step):
        assert WAIT not in rank["operators"]


def test_step_when_parameters_are_sharded_then_each_collective_is_there_with_its_wait() -> None:
    for rank in found("shard"):
        operators = rank["operators"]
        assert operators["c10d._allgather_base_.default"] == 2 * LAYERS
        assert operators["c10d._reduce_scatter_base_.default"] == LAYERS
        assert operators[WAIT] >= 2 * LAYERS
        assert rank["phases"] == ["backward", "forward"]


@pytest.mark.promise("F9")
@pytest.mark.promise("B15")
@pytest.mark.parametrize("collective", ["gather", "reduce_scatter"])
def test_copies_when_the_step_waits_in_a_collective_then_they_go_on(collective: str) -> None:
    waiting = found(collective)[0]
    under_way, left = waiting["copied"]
    assert under_way > 0
    assert left == 0


def test_microbatches_when_a_rank_has_two_stages_then_they_are_those_of_the_schedule() -> None:
    for number, rank in enumerate(found("pipeline")):
        forward, backward = rank["tanh"]
        assert sorted(forward) == sorted(2 * list(range(MICROBATCHES)))  # once for each stage
        assert sorted(backward) == sorted(forward)
        assert forward[:4] == [0, 1, 0, 1], number
        assert rank["operators"][WAIT] > 0


def test_peak_when_a_wrapper_keeps_buckets_for_gradients_then_they_count_once() -> None:
    for rank in found("keep_buckets"):
        assert rank["peak"] == pytest.approx(1, rel=0.01)


def test_torch_when_a_step_has_been_recorded_then_it_has_its_own_methods_again() -> None:
    for step in "reduce_late", "fail", "shard", "pipeline":
        assert all(rank["is_plain"] for rank in found(step))
