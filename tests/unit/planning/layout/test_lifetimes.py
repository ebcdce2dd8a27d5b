"""Lifetimes of a planned step: what the simulator counts, in the order in which it happens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.passes import divide_weights
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import BEFORE, Kind, Operator, Phase, Storage, Trace
from swapkit.planning.layout.lifetimes import NO_STORAGE, ROUNDING_BYTES, find_lifetimes
from swapkit.planning.planner import make_plan
from swapkit.simulation.timeline import simulate
from tests.oracles import layout_twin
from tests.support.random_traces import random_trace

if TYPE_CHECKING:
    from swapkit.ir.plans import Schedule


AMPLE = Machine(budget_bytes=1 << 50, out_bytes_per_second=300.0, in_bytes_per_second=300.0)


def scale(trace: Trace) -> Trace:
    """Return the trace with sizes that rounding does not change."""
    return replace(
        trace,
        base_bytes=trace.base_bytes * ROUNDING_BYTES,
        storages=tuple(
            replace(each, nbytes=each.nbytes * ROUNDING_BYTES) for each in trace.storages
        ),
        operators=tuple(
            replace(each, workspace_bytes=each.workspace_bytes * ROUNDING_BYTES)
            for each in trace.operators
        ),
    )


def plan_randomly(seed: int) -> tuple[Trace, Plan, Schedule] | None:
    """Return a random step under a plan for less memory than it takes; None: there is none."""
    trace = scale(random_trace(seed))
    machine = replace(
        AMPLE,
        budget_bytes=int(trace.peak_bytes * 0.8),
        out_bytes_per_second=300.0 * ROUNDING_BYTES,
        in_bytes_per_second=300.0 * ROUNDING_BYTES,
    )
    try:
        plan = make_plan(trace, machine)
    except InfeasibleBudget:
        return None
    return trace, plan, simulate(trace, plan, machine)


@pytest.mark.parametrize("seed", range(8))
def test_without_a_plan_the_bound_is_the_peak_of_the_trace(seed: int) -> None:
    trace = scale(random_trace(seed))
    plan = Plan(decisions=(), budget_bytes=AMPLE.budget_bytes)
    step = find_lifetimes(trace, plan, simulate(trace, plan, AMPLE))
    bound, _ = layout_twin.measure_loads(step.lifetimes)
    assert step.resident_bytes + bound == trace.peak_bytes


def test_under_a_plan_the_bound_is_close_to_the_simulated_peak() -> None:
    compared = 0
    for seed in range(40):
        planned = plan_randomly(seed)
        if planned is None or not planned[1].decisions:
            continue
        trace, plan, schedule = planned
        step = find_lifetimes(trace, plan, schedule)
        bound, _ = layout_twin.measure_loads(step.lifetimes)
        assert step.resident_bytes + bound <= plan.budget_bytes
        assert step.resident_bytes + bound >= 0.9 * schedule.prediction.peak_bytes
        compared += step.resident_bytes + bound == schedule.prediction.peak_bytes
    assert compared >= 10


def test_moved_storages_have_two_stays_and_the_others_one() -> None:
    trace, plan, schedule = next(filter(None, map(plan_randomly, range(3, 40))))
    step = find_lifetimes(trace, plan, schedule)
    moved = {each.storage for each in plan.decisions if each.action is not Action.KEEP}
    assert moved
    for storage in moved:
        (places,) = np.nonzero(step.storages == storage)
        assert len(places) == 2
        first, second = places
        assert step.lifetimes.ends[first] <= step.lifetimes.starts[second]
        size = trace.storages[storage].nbytes
        assert step.lifetimes.nbytes[first] == step.lifetimes.nbytes[second] == size
    others, counts = np.unique(step.storages, return_counts=True)
    kept = ~np.isin(others, [NO_STORAGE, *moved])
    assert kept.any()
    assert (counts[kept] == 1).all()


def test_in_a_session_stays_end_where_the_plan_releases() -> None:
    longer = 0
    for seed in range(40):
        planned = plan_randomly(seed)
        if planned is None:
            continue
        some = find_lifetimes(*planned)
        more = find_lifetimes(*planned, in_session=True)
        before, _ = layout_twin.measure_loads(some.lifetimes)
        after, _ = layout_twin.measure_loads(more.lifetimes)
        assert more.resident_bytes + after <= planned[1].budget_bytes
        assert after >= before
        longer += after > before
    assert longer


def test_sizes_are_rounded_as_the_pool_rounds_them() -> None:
    trace = random_trace(1)
    plan = Plan(decisions=(), budget_bytes=AMPLE.budget_bytes)
    step = find_lifetimes(trace, plan, simulate(trace, plan, AMPLE))
    assert (step.lifetimes.nbytes % ROUNDING_BYTES == 0).all()
    assert step.resident_bytes % ROUNDING_BYTES == 0


def test_a_storage_that_goes_on_as_another_does_not_move() -> None:
    operators = tuple(Operator(name="op", seconds=1.0, phase=Phase.FORWARD) for _ in range(6))
    size = 4 * ROUNDING_BYTES
    storages = (
        Storage(nbytes=size, birth=1, death=3),
        Storage(nbytes=size, birth=3, death=5, continues=0),
        Storage(nbytes=size, birth=2, death=4),
    )
    trace = Trace(operators=operators, storages=storages)
    plan = Plan(decisions=(), budget_bytes=AMPLE.budget_bytes)
    step = find_lifetimes(trace, plan, simulate(trace, plan, AMPLE))
    assert step.storages.tolist() == [0, 2]
    assert step.operators.tolist() == [1, 2]
    assert step.lifetimes.ends[0] > step.lifetimes.ends[1]


def test_a_weight_that_is_there_as_a_step_ends_is_where_the_next_one_finds_it() -> None:
    reads = ((0,), *[(1,)] * 20, (0,), (2,), (2,), (1,))
    operators = [
        Operator(name="op", seconds=1.0, phase=Phase.FORWARD, reads=each) for each in reads
    ]
    sizes = [4 * ROUNDING_BYTES, 2 * ROUNDING_BYTES, ROUNDING_BYTES]
    storages = [
        Storage(nbytes=size, kind=Kind.STATE, birth=BEFORE, death=len(reads), module=str(number))
        for number, size in enumerate(sizes)
    ]
    trace = divide_weights(Trace(operators=tuple(operators), storages=tuple(storages)))
    behind = next(
        number
        for number, each in enumerate(trace.storages)
        if each.module == "0" and each.birth != BEFORE
    )
    decision = Decision(storage=behind, action=Action.SWAP, prefetch=10)
    plan = Plan(decisions=(decision,), budget_bytes=AMPLE.budget_bytes)
    step = find_lifetimes(trace, plan, simulate(trace, plan, AMPLE))
    lifetimes = step.lifetimes
    (weight,) = np.flatnonzero(lifetimes.nbytes == sizes[0])  # one life, over the step's end
    assert lifetimes.ends[weight] > lifetimes.period > lifetimes.starts[weight] > 0
    assert lifetimes.ends[weight] - lifetimes.starts[weight] < lifetimes.period
    assert step.resident_bytes == sizes[1] + sizes[2]
