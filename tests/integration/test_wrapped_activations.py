"""Activations that are DTensors, or results of collectives, move like plain tensors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import ROOT
from tests.support.ranks import run_on_ranks

PROGRAM = ROOT / "tests" / "integration" / "wrapped_activations_program.py"
ON_TWO = ("tp", "dtensors", "sequence", "experts")
ON_FOUR = "fully sharded"
GLOO_THREADS = 2  # of a group: `ProcessGroupGloo::Options`


def found(program: str) -> dict[str, list[Any]]:
    """Return what each rank has found."""
    everything = (
        run_on_ranks(PROGRAM, ON_FOUR, ranks=4)
        if program == ON_FOUR
        else run_on_ranks(PROGRAM, *ON_TWO)
    )
    result: dict[str, list[Any]] = everything
    return result


@pytest.mark.parametrize("program", [*ON_TWO, ON_FOUR])
def test_activations_when_ranks_swap_them_then_all_that_is_saved_but_weights_moves(
    program: str,
) -> None:
    saved, moved = (found(program)[f"{program}: {what}"] for what in ("saved", "moved"))
    assert all(one >= 0.95 * other > 0 for one, other in zip(moved, saved, strict=True))


@pytest.mark.promise("A3")
@pytest.mark.parametrize(
    ("program", "share"),
    [
        *[(program, share) for program in ("tp", "dtensors", "sequence") for share in (0.85, 0.6)],
        ("experts", 0.85),
        *[(ON_FOUR, share) for share in (0.85, 0.6)],
    ],
)
def test_sessions_when_activations_are_wrapped_then_planned_within_budget_and_the_same_bits(
    program: str, share: float
) -> None:
    for rank in found(program)[f"{program}: {share}"]:
        assert rank["same"]
        assert rank["held"]
        assert rank["planned"] > 0


@pytest.mark.parametrize("program", ["dtensors", "sequence"])
def test_traces_when_weights_are_sharded_then_they_know_them_and_their_states(program: str) -> None:
    for rank in found(program)[f"{program}: 0.6"]:
        assert rank["states"] == rank["expected"]


@pytest.mark.parametrize("program", ["tp", "dtensors", "sequence"])
def test_events_when_a_step_is_recorded_without_a_session_then_those_of_a_session(
    program: str,
) -> None:
    for rank in found(program)[f"{program}: 0.85"]:
        # In each of the two steps, each thread of gloo may still hold its last result when backward
        # begins: no plan moves that.
        for step in range(2):
            held = [pair for pair in rank["unlike"] if pair[step][1] is None]
            assert len(held) <= GLOO_THREADS * len(("save", "use"))
        for (kind, size), (other_kind, other_size) in rank["unlike"]:
            assert kind == other_kind
            assert None in {size, other_size}
