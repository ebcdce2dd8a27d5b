"""Comparisons: the demand of a trace, and the least budget that serves it."""

from __future__ import annotations

import pytest

from benchmarks.replay.allocations import allocations_of_intervals
from benchmarks.replay.caching import MIB
from benchmarks.replay.comparing import compare_allocators, measure_demand
from benchmarks.replay.native import NativeAllocator
from benchmarks.replay.replaying import replay
from tests.unit.benchmarks_replay.test_replaying import HOLES
from tests.unit.benchmarks_replay.values import ALLOCATIONS


def test_demand_when_measured_then_what_was_there_and_what_stays() -> None:
    demand = measure_demand(ALLOCATIONS)
    assert demand.present_bytes == 4096
    assert (demand.kept, demand.kept_bytes) == (1, 4096)
    assert (demand.max_live_bytes, demand.max_live_rounded_bytes) == (4609, 5120)
    assert demand.internal == pytest.approx(5120 / 4609 - 1)


def test_allocators_when_compared_then_the_planned_one_needs_least() -> None:
    reports = {each.key: each for each in compare_allocators(HOLES, budget_bytes=130 * MIB)}
    demand = measure_demand(HOLES)
    assert reports["planned"].external(demand) == 0
    assert reports["planned"].layout_excess == 0
    assert reports["torch_native"].layout_excess is None
    assert reports["torch_native"].external(demand) == pytest.approx(50 / 130)
    assert reports["torch_native"].requested_utilisation(demand) == pytest.approx(130 / 180)
    assert all(each.least_bytes is None for each in reports.values())


def test_least_budget_when_searched_then_it_serves_and_less_does_not() -> None:
    # 50 MiB can go back, and the rest of a segment of 20 MiB can not.
    trace = allocations_of_intervals(
        [(0, 9, 9 * MIB), (1, 2, 50 * MIB), (3, 9, 70 * MIB), (4, 9, MIB)]
    )
    reports = {each.key: each for each in compare_allocators(trace, search_least=True)}
    least = reports["torch_native"].least_bytes
    assert least is not None
    most = reports["torch_native"].free.peak_reserved_bytes
    assert 80 * MIB <= least < most
    assert replay(trace, NativeAllocator(budget_bytes=least)).failure is None
    less = least - (most - 80 * MIB) // 128
    assert replay(trace, NativeAllocator(budget_bytes=less)).failure is not None
    assert reports["planned"].least_bytes == 80 * MIB


def test_least_budget_when_cached_memory_can_go_back_then_below_the_peak() -> None:
    # 30 MiB are cached when 40 are wanted: given back first, both fit in 40.
    trace = allocations_of_intervals([(0, 1, 30 * MIB), (2, 3, 40 * MIB)])
    native = compare_allocators(trace, search_least=True)[0]
    assert native.free.peak_reserved_bytes == 70 * MIB
    assert native.least_bytes is not None
    assert 40 * MIB <= native.least_bytes < 41 * MIB
