"""The pool with planned addresses: the real pool, and the addresses that a session would plan."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay.allocations import allocations_of_intervals
from benchmarks.replay.caching import MIB
from benchmarks.replay.native import NativeAllocator
from benchmarks.replay.planned_pool import PlannedPool
from benchmarks.replay.pool import GRANULE_BYTES
from benchmarks.replay.replaying import replay
from swapkit._native.layout import TAG_BACKWARD, TAG_OPTIMIZER, Lives
from swapkit.ir.traces import Phase
from swapkit.planning.layout.steps import LIFE
from tests.unit.benchmarks_replay.test_replaying import HOLES
from tests.unit.benchmarks_replay.values import make_trace

# A weight, a gradient and an input; then activations, and the next gradient.
STEP = make_trace(
    tuple(nbytes * MIB for nbytes in (8, 6, 2, 10, 4, 6, 1)),
    "+ + + -1 + + -2 + -3 + -4",
    present=3,
)


def test_step_when_it_repeats_then_all_of_it_lies_as_planned() -> None:
    with closing(PlannedPool(HOLES)) as planned:
        outcome = planned.run()
        layout = planned.layout
    assert layout is not None
    assert (layout.hits, layout.requests, layout.maps) == (6, 6, 0)
    assert layout.hit_bytes == sum(block.nbytes for block in HOLES.blocks)
    assert layout.height_bytes == layout.lower_bound_bytes == 130 * MIB
    assert outcome.peak_reserved_bytes == outcome.peak_allocated_bytes == 130 * MIB
    assert outcome.failure is None


@pytest.mark.promise("F15")
def test_step_when_blocks_outlive_it_then_nothing_grows_from_step_to_step() -> None:
    with closing(PlannedPool(STEP)) as planned:
        outcomes = [planned.run() for _ in range(3)]
        layout = planned.layout
        pool = planned._allocator.pool
        assert pool.in_use_bytes() == (8 + 6 + 1) * MIB  # what the last repetition left
        pool.check()
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert layout is not None
    # The weight lasts: it lies outside the layout, and everything else in it. At most 20 MiB are in
    # use at once (10, 4 and the gradient's 6), but the input cannot lie in any of them: each is in
    # use beside it, the gradient as what the step before left. So 22 MiB are the best possible.
    assert (layout.hits, layout.requests) == (5, 5)
    assert (layout.height_bytes, layout.lower_bound_bytes) == (22 * MIB, 20 * MIB)
    assert outcomes[0].peak_allocated_bytes == 28 * MIB
    assert outcomes[0].peak_reserved_bytes <= (8 + 22) * MIB + GRANULE_BYTES


def test_run_when_the_budget_is_below_what_the_step_leaves_then_its_first_request_fails() -> None:
    trace = make_trace((10 * MIB, MIB), "+ + -1")
    with closing(PlannedPool(trace)) as planned:
        outcomes = [planned.run(), planned.run(2 * MIB), planned.run(11 * MIB), planned.run()]
    failures = [outcome.failure for outcome in outcomes]
    assert failures[1] is not None
    assert (failures[1].event, failures[1].asked_bytes) == (0, 10 * MIB)
    assert failures[0] is failures[3] is None
    assert outcomes[0] == outcomes[3]
    assert outcomes[2].peak_reserved_bytes <= 11 * MIB


def test_budget_when_it_is_too_small_then_the_next_replay_is_as_before() -> None:
    with closing(PlannedPool(STEP)) as planned:
        before = planned.run()
        for budget in (3 * MIB, 12 * MIB, 20 * MIB, 27 * MIB):
            failure = planned.run(budget).failure
            assert failure is not None
            assert failure.reserved_bytes <= budget
        assert planned.run() == before
        assert planned.run(before.peak_reserved_bytes).failure is None
        planned._allocator.pool.check()


def test_budget_when_what_was_there_before_is_above_it_then_the_first_such_block() -> None:
    with closing(PlannedPool(STEP)) as planned:
        failure = planned.run(9 * MIB).failure
    assert failure is not None
    assert (failure.event, failure.block, failure.asked_bytes) == (1, 1, 6 * MIB)
    assert failure.reserved_bytes == failure.allocated_bytes == 8 * MIB


def test_streams_when_most_bytes_are_of_one_then_only_its_blocks_have_places() -> None:
    blocks = tuple(
        replace(block, stream=7 * (number == 5)) for number, block in enumerate(HOLES.blocks)
    )
    with closing(PlannedPool(replace(HOLES, blocks=blocks))) as planned:
        assert planned.run().failure is None
        layout = planned.layout
    assert layout is not None
    assert (layout.hits, layout.requests) == (5, 6)


def test_streams_when_none_has_most_bytes_then_there_is_no_layout() -> None:
    blocks = tuple(replace(block, stream=number % 2) for number, block in enumerate(HOLES.blocks))
    with closing(PlannedPool(replace(HOLES, blocks=blocks))) as planned:
        assert planned.layout is None
        assert planned.run().failure is None
        assert planned.run(60 * MIB).failure is not None
        assert planned.run().failure is None


def test_requests_when_their_phase_is_known_then_tagged_as_a_session_tags_them() -> None:
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    blocks = tuple(
        replace(block, phase=phases[number // 2], label=f"call {number % 2}")
        for number, block in enumerate(HOLES.blocks)
    )
    with closing(PlannedPool(replace(HOLES, blocks=blocks))) as planned:
        buffer, _ = Lives(planned._allocator.pool).read()
        layout = planned.layout
    tags = np.frombuffer(buffer, LIFE)["tag"].tolist()
    assert len(set(tags)) == 6
    assert sum(tag & TAG_BACKWARD != 0 for tag in tags) == 2
    assert sum(tag & TAG_OPTIMIZER != 0 for tag in tags) == 2
    assert layout is not None
    assert layout.hit_share == 1


@pytest.mark.promise("E4")
def test_budget_when_free_memory_would_be_in_pieces_then_the_planned_step_fits() -> None:
    pieces = [(number, 40 if number % 2 else 10, 5 * MIB) for number in range(8)]
    trace = allocations_of_intervals([*pieces, (20, 30, 15 * MIB)])
    failure = replay(trace, NativeAllocator(budget_bytes=40 * MIB)).failure
    assert failure is not None
    assert failure.allocated_bytes == 20 * MIB
    with closing(PlannedPool(trace)) as planned:
        assert planned.run(40 * MIB).failure is None


def test_layout_when_the_pool_has_no_places_then_requests_do_not_lie_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_layout = Lives.set_layout
    monkeypatch.setattr(
        Lives, "set_layout",
        lambda lives, places, _count, height: set_layout(lives, places[:1], 1, height),
    )  # fmt: skip
    with closing(PlannedPool(HOLES)) as planned:
        layout = planned.layout
    assert layout is None or layout.hits <= 1
