"""Batches of sizes that were not recorded: a line through two steps, or through their budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.ir.traces import Kind, Operator, Phase, Storage, Trace
from swapkit.planning.estimates import MOST_TIMES, Batches, find_need

WEIGHTS = 10_240
SAMPLE = 1_024


def step(samples: int, *, names: tuple[str, ...] = ("mm", "mm_backward")) -> Trace:
    """Return a step whose one activation and workspace grow with the batch."""
    forward, backward = names
    return Trace(
        operators=(
            Operator(
                name=forward,
                seconds=1e-3 * samples,
                phase=Phase.FORWARD,
                reads=(0,),
                writes=(1,),
                workspace_bytes=512 * samples,
            ),
            Operator(
                name=backward, seconds=2e-3 * samples, phase=Phase.BACKWARD, reads=(0, 1), writes=()
            ),
        ),
        storages=(
            Storage(nbytes=WEIGHTS, kind=Kind.STATE, death=2),
            Storage(nbytes=SAMPLE * samples, birth=0, death=2),
        ),
    )


def peak(trace: Trace) -> int:
    return trace.peak_bytes


def expected_peak(samples: int) -> int:
    return WEIGHTS + (SAMPLE + 512) * samples


def test_batches_when_alike_then_every_size_as_if_it_had_been_recorded() -> None:
    batches = Batches((4, 8), (step(4), step(8)), peak)
    assert batches.are_alike
    for samples in (1, 4, 6, 8, 100):
        assert batches.smallest_bytes(samples) == expected_peak(samples)
        trace = batches.trace(samples)
        assert trace is not None
        assert trace.seconds == pytest.approx(3e-3 * samples)


@pytest.mark.parametrize("samples", [1, 3, 4, 7, 8, 9, 31, 1000])
def test_largest_when_a_batch_just_fits_then_it_and_one_byte_less_gives_one_sample_less(
    samples: int,
) -> None:
    batches = Batches((4, 8), (step(4), step(8)), peak)
    assert batches.find_largest(expected_peak(samples)) == samples
    assert batches.find_largest(expected_peak(samples) - 1) == samples - 1


def test_largest_when_the_steps_are_not_alike_then_by_the_line_through_their_budgets() -> None:
    other = replace(step(8, names=("mm_large", "mm_backward")))
    batches = Batches((4, 8), (step(4), other), peak)
    assert not batches.are_alike
    assert batches.trace(20) is None
    assert batches.smallest_bytes(20) == expected_peak(20)
    assert batches.find_largest(expected_peak(20)) == 20


def test_largest_when_memory_does_not_grow_then_a_bound() -> None:
    batches = Batches((4, 8), (step(4), step(4)), peak)
    assert batches.find_largest(1 << 40) == MOST_TIMES * 8
    assert batches.is_capped(MOST_TIMES * 8)
    assert not batches.is_capped(MOST_TIMES * 8 - 1)
    assert batches.find_largest(1) == 0


def test_need_when_the_pool_has_granules_then_whole_ones_and_never_above_plain() -> None:
    need = find_need(step(4), None, 4096)
    assert need.plain_bytes % 4096 == need.smallest_bytes % 4096 == 0
    assert need.floor_bytes == need.state_bytes == WEIGHTS
    assert need.smallest_bytes == need.plain_bytes  # nothing was saved, so nothing moves
