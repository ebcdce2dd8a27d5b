"""Memory over a step by kind of data: it agrees with the simulator, and with steps made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.ir.traces import Kind
from swapkit.simulation.occupancy import ON_DEVICE, Layer, measure_occupancy
from swapkit.simulation.timeline import as_plan, run, simulate
from tests.unit.simulation.handmade import (
    AGAIN,
    KEPT,
    REPEATED,
    STEP,
    SWAP,
    SWAPPED,
    plan_of,
)
from tests.unit.simulation.test_timeline import draw


@pytest.mark.parametrize("seed", range(40))
def test_occupancy_when_steps_are_random_then_its_peaks_are_those_of_the_simulator(
    seed: int,
) -> None:
    trace, problem, machine, actions = draw(seed)
    machine = replace(machine, budget_bytes=1 << 50, host_bytes=None)
    plan = as_plan(trace, problem, machine, actions, run(problem, machine, actions), policy="any")
    schedule = simulate(trace, plan, machine)
    occupancy = measure_occupancy(trace, plan, schedule)
    peak = schedule.prediction.peak_bytes
    assert 0.98 * peak <= max(occupancy.in_use()) <= peak  # it counts operators, not slots
    assert max(occupancy.layers[Layer.HOST]) == schedule.prediction.host_peak_bytes
    assert max(occupancy.layers[Layer.DISK]) == schedule.prediction.disk_peak_bytes
    assert max(occupancy.layers[Layer.PLAIN]) == trace.peak_bytes
    assert min(min(row) for row in occupancy.layers.values()) >= 0
    thin = measure_occupancy(trace, plan, schedule, most_rows=20)
    assert len(thin.times) <= 20 < len(occupancy.times) == thin.instants
    assert max(thin.in_use()) == max(occupancy.in_use())
    for layer in (Layer.HOST, Layer.DISK, Layer.PLAIN):
        assert max(thin.layers[layer]) == max(occupancy.layers[layer])


def test_occupancy_when_nothing_moves_then_that_of_the_trace() -> None:
    occupancy = measure_occupancy(STEP, plan_of(), KEPT)
    assert occupancy.times == KEPT.starts
    assert occupancy.in_use() == list(occupancy.layers[Layer.PLAIN]) == STEP.memory()
    assert occupancy.layers[Layer.BASE] == (1000,) * 6
    assert occupancy.layers[Layer.SAVED] == (100, 120, 130, 130, 120, 100)
    assert max(occupancy.layers[Layer.HOST]) == 0


def test_occupancy_when_a_storage_is_swapped_then_on_the_host_meanwhile() -> None:
    occupancy = measure_occupancy(STEP, SWAP, SWAPPED)
    assert max(occupancy.in_use()) == SWAPPED.prediction.peak_bytes
    assert occupancy.layers[Layer.SAVED] == (100, 120, 30, 30, 120, 100)
    assert occupancy.layers[Layer.HOST] == (0, 100, 100, 100, 100, 0)


def test_occupancy_when_a_storage_is_recomputed_then_gone_meanwhile() -> None:
    occupancy = measure_occupancy(STEP, AGAIN, REPEATED)
    assert occupancy.layers[Layer.SAVED] == (100, 120, 130, 110, 120, 100)
    assert max(occupancy.in_use()) == REPEATED.prediction.peak_bytes


def test_occupancy_when_storages_have_kinds_then_told_apart() -> None:
    kinds = (Kind.STATE, Kind.ACTIVATION, Kind.ACTIVATION, Kind.ACTIVATION, Kind.GRADIENT)
    storages = tuple(
        replace(storage, kind=kind, is_saved=kind is Kind.ACTIVATION)
        for storage, kind in zip(STEP.storages, kinds, strict=True)
    )
    occupancy = measure_occupancy(replace(STEP, storages=storages), plan_of(), KEPT)
    assert occupancy.layers[Layer.STATE] == (7,) * 6
    assert occupancy.layers[Layer.GRADIENT] == (0, 0, 0, 5, 5, 5)
    assert occupancy.layers[Layer.TEMPORARY] == (0, 0, 30, 0, 0, 0)
    assert set(ON_DEVICE) | {Layer.HOST, Layer.DISK, Layer.PLAIN} == set(Layer)


def test_recomputations_when_they_share_work_then_it_counts_once() -> None:
    for seed in range(40):
        trace, problem, machine, actions = draw(seed)
        machine = replace(machine, budget_bytes=1 << 50, host_bytes=None)
        found = run(problem, machine, actions)
        plan = as_plan(trace, problem, machine, actions, found, policy="any")
        schedule = simulate(trace, plan, machine)
        spent = sum(each.seconds for each in schedule.recomputations)
        assert spent == pytest.approx(schedule.prediction.recompute_seconds)
