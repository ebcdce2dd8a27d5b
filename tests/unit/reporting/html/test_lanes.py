"""Blocks of a step: every second of work is in one, and narrow neighbours are joined."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from swapkit.ir.plans import Action
from swapkit.ir.traces import Phase
from swapkit.reporting.html.lanes import MOST_COLUMNS, WAITING, Lane, WorkBlock, list_blocks
from swapkit.simulation.timeline import simulate
from tests.support.run_records import make_large
from tests.unit.simulation.handmade import AGAIN, AMPLE, MACHINE, REPEATED, STEP, SWAP


def spent(blocks: list[WorkBlock], lane: Lane, *kinds: str) -> float:
    return sum(
        each.end - each.start
        for each in blocks
        if each.lane is lane and (not kinds or each.kind in kinds)
    )


def test_blocks_when_a_storage_is_recomputed_then_the_time_is_in_its_lane() -> None:
    blocks = list_blocks(STEP, simulate(STEP, AGAIN, AMPLE))
    (again,) = [each for each in blocks if each.lane is Lane.RECOMPUTE]
    assert (again.start, again.end) == (4.0, 5.0)
    assert "20 B" in again.detail
    computing = [each for each in blocks if each.lane is Lane.COMPUTE]
    assert [each.start for each in computing] == [0, 1, 2, 3, 5, 6]
    assert REPEATED.ends[-1] == computing[-1].end


def test_blocks_when_computing_waits_then_red_with_what_it_waits_for() -> None:
    slow = replace(MACHINE, in_bytes_per_second=50.0)
    blocks = list_blocks(STEP, simulate(STEP, SWAP, slow))
    (waiting,) = [each for each in blocks if each.kind == WAITING]
    assert waiting.lane is Lane.COMPUTE
    assert (waiting.start, waiting.end) == (5.0, 6.0)
    assert "100 B" in waiting.detail
    (out,) = [each for each in blocks if each.lane is Lane.OUT]
    (back,) = [each for each in blocks if each.lane is Lane.IN]
    assert (out.start, out.end, back.start, back.end) == (1.0, 2.0, 4.0, 6.0)


@pytest.mark.parametrize("layers", [2, 300])
def test_blocks_when_there_are_many_operators_then_few_blocks_with_all_the_time(
    layers: int,
) -> None:
    record = make_large(layers, steps=1)
    trace, plan, machine = record.trace, record.plan, record.machine
    assert trace is not None
    assert plan is not None
    assert machine is not None
    schedule = simulate(trace, plan, machine)
    blocks = list_blocks(trace, schedule)
    assert len(blocks) < 3 * 2 * MOST_COLUMNS
    phases = [phase.value for phase in Phase]
    assert spent(blocks, Lane.COMPUTE, *phases) == pytest.approx(trace.seconds)
    assert spent(blocks, Lane.COMPUTE, WAITING) == pytest.approx(
        schedule.prediction.stall_seconds, abs=1e-12
    )
    assert any(each.action is Action.SWAP for each in plan.decisions)
    for lane in Lane:
        row = [each for each in blocks if each.lane is lane]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(row))
    joined = [each for each in blocks if each.label.startswith(tuple("23456789"))]
    assert bool(joined) == (layers == 300)
