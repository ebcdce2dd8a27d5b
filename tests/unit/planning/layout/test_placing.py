"""Layouts: valid, close to the bound, the same for the same arguments, ended early when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkit._native.layout import BEST_FIT, FIRST_FIT, NativeItems, StopFlag
from swapkit.errors import CorruptState, InvalidArgument
from swapkit.planning.layout import placing
from swapkit.planning.layout.lifetimes import Lifetimes, MemoryLayout
from swapkit.planning.layout.placing import PLACEMENTS, Measures, place
from tests.oracles import layout_twin
from tests.unit.planning.layout.drawing import (
    COUNTS,
    SEEDS,
    draw_laminar,
    draw_lifetimes,
    draw_packing,
    draw_steps,
    fix_some,
    live_together,
    overlaps,
    unroll,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Draw = Callable[[int, int], Lifetimes]

DRAWS = st.sampled_from([draw_lifetimes, draw_steps])


def native(lifetimes: Lifetimes) -> NativeItems:
    return NativeItems(
        lifetimes.starts, lifetimes.ends, lifetimes.nbytes, lifetimes.fixed, lifetimes.period
    )


def check(lifetimes: Lifetimes, layout: MemoryLayout) -> None:
    step, offsets = unroll(lifetimes, layout.offsets)
    assert not overlaps(step, offsets)
    assert layout.height == int((offsets + step.nbytes).max(initial=0))
    assert layout.lower_bound <= layout.height
    assert layout_twin.verify(step, offsets) == layout.height


@settings(max_examples=60, deadline=None)
@given(draw=DRAWS, seed=SEEDS, count=COUNTS)
def test_layouts_are_valid_and_at_least_as_high_as_the_bound(
    draw: Draw, seed: int, count: int
) -> None:
    lifetimes = draw(seed, count)
    check(lifetimes, place(lifetimes, seconds=0.2))


@settings(max_examples=60, deadline=None)
@given(draw=DRAWS, seed=SEEDS, count=COUNTS)
def test_the_bound_is_the_most_bytes_alive_at_any_time(draw: Draw, seed: int, count: int) -> None:
    lifetimes = draw(seed, count)
    step, both = unroll(lifetimes, np.arange(count))
    times = step.starts[:, None]
    alive = (step.starts <= times) & (times < step.ends)
    most = int((alive * step.nbytes).sum(1).max())
    loads = np.empty(count, np.int64)
    assert native(lifetimes).measure(loads) == most
    bound, expected = layout_twin.measure_loads(step)
    assert bound == most
    assert all(loads[item] == expected[both == item].max() for item in range(count))
    assert loads.max() == most


@settings(max_examples=40, deadline=None)
@given(draw=DRAWS, seed=SEEDS, count=COUNTS)
def test_an_item_is_placed_in_the_lowest_gap_and_pressing_keeps_layouts_valid(
    draw: Draw, seed: int, count: int
) -> None:
    lifetimes = draw(seed, count)
    items, offsets = native(lifetimes), np.full(count, -1, np.int64)
    items.place(np.arange(count, dtype=np.int32), FIRST_FIT, offsets)
    for item in range(count):
        beside = [each for each in range(item) if live_together(lifetimes, item, each)]
        tops = offsets + lifetimes.nbytes
        free = [
            at
            for at in (0, *tops[beside])
            if all(
                tops[each] <= at or at + lifetimes.nbytes[item] <= offsets[each] for each in beside
            )
        ]
        assert offsets[item] == min(free)
    height = items.verify(offsets)
    items.press(offsets, most_work=200_000, target=0, seed=seed, stop=StopFlag())
    assert items.verify(offsets) <= height
    assert not overlaps(*unroll(lifetimes, offsets))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, count=COUNTS)
def test_the_twin_places_bit_by_bit_as_the_native_core(seed: int, count: int) -> None:
    lifetimes = draw_lifetimes(seed, count)
    order = np.random.default_rng(seed).permutation(count).astype(np.int32)
    for fit in (FIRST_FIT, BEST_FIT):
        offsets = np.empty(count, np.int64)
        native(lifetimes).place(order, fit, offsets)
        assert np.array_equal(offsets, layout_twin.place(lifetimes, order, fit))


def test_the_twin_equals_the_core_where_lists_have_many_chunks_and_levels() -> None:
    lifetimes = draw_lifetimes(5, 3000, times=2500, most_bytes=1 << 30)
    bound, loads = layout_twin.measure_loads(lifetimes)
    for rule in PLACEMENTS:
        order = rule.order(Measures.of(lifetimes, bound, loads))
        offsets = np.empty(3000, np.int64)
        native(lifetimes).place(order, rule.fit, offsets)
        assert np.array_equal(offsets, layout_twin.place(lifetimes, order, rule.fit))


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, count=COUNTS)
def test_nested_lifetimes_are_optimal_with_the_longest_first(seed: int, count: int) -> None:
    lifetimes = draw_laminar(seed, count)
    order = np.argsort(lifetimes.starts - lifetimes.ends, kind="stable").astype(np.int32)
    offsets = np.empty(len(lifetimes), np.int64)
    items = native(lifetimes)
    items.place(order, FIRST_FIT, offsets)
    assert items.verify(offsets) == items.measure()
    assert place(lifetimes, tolerance=0).excess == 0


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, count=COUNTS)
def test_items_of_one_size_are_optimal_by_their_start(seed: int, count: int) -> None:
    some = draw_lifetimes(seed, count)
    lifetimes = Lifetimes(some.starts, some.ends, np.full(count, 512))
    assert place(lifetimes, tolerance=0).excess == 0


def test_an_exact_search_of_steps_that_repeat_is_refused() -> None:
    items = native(draw_steps(0, 8))
    offsets = np.zeros(8, np.int64)
    with pytest.raises(InvalidArgument, match="no period"):
        items.search(1 << 20, 0, offsets, most_work=1, stop=StopFlag())


@pytest.mark.parametrize("seed", range(4))
def test_a_perfect_packing_is_found_by_exact_search(seed: int) -> None:
    lifetimes = draw_packing(seed, 60)
    layout = place(lifetimes, capacity=1 << 12, seconds=60)
    check(lifetimes, layout)
    assert layout.height == layout.lower_bound == 1 << 12


def test_the_same_arguments_give_the_same_layout_and_the_seed_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetimes = draw_packing(7, 1100, side=1 << 20)
    monkeypatch.setattr(placing, "IMPROVEMENT", 60_000_000)

    def offsets(seed: int) -> bytes:
        return place(lifetimes, seed=seed, tolerance=0).offsets.tobytes()

    first = offsets(0)
    assert offsets(0) == first
    assert any(offsets(seed) != first for seed in range(1, 4))


def test_lanes_run_one_after_the_other_give_the_same_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetimes = draw_packing(8, 1100, side=1 << 20)
    monkeypatch.setattr(placing, "IMPROVEMENT", 60_000_000)
    both = place(lifetimes, tolerance=0)
    monkeypatch.setattr(placing, "run_lanes", lambda works, _limits: [work() for work in works])
    alone = place(lifetimes, tolerance=0)
    assert both.offsets.tobytes() == alone.offsets.tobytes()


def test_improvement_lowers_the_best_placement() -> None:
    lifetimes = draw_packing(9, 1100, side=1 << 20)
    bound, loads = layout_twin.measure_loads(lifetimes)
    measures = Measures.of(lifetimes, bound, loads)
    heights = []
    for rule in PLACEMENTS:
        offsets = np.empty(len(lifetimes), np.int64)
        native(lifetimes).place(rule.order(measures), rule.fit, offsets)
        heights.append(native(lifetimes).verify(offsets))
    layout = place(lifetimes, tolerance=0)
    check(lifetimes, layout)
    assert layout.height < min(heights)


def test_fixed_items_stay_and_the_others_lie_beside_them() -> None:
    lifetimes = draw_lifetimes(10, 200)
    before = place(lifetimes, seconds=0.2)
    fixed = fix_some(lifetimes, before.offsets, 0.3)
    layout = place(fixed, seconds=1)
    check(fixed, layout)
    assert fixed.fixed is not None
    kept = fixed.fixed >= 0
    assert kept.any()
    assert np.array_equal(layout.offsets[kept], before.offsets[kept])


def test_fixed_items_stay_when_a_layout_is_pressed() -> None:
    lifetimes = draw_packing(14, 600, side=1 << 20)
    fixed = fix_some(lifetimes, place(lifetimes, seconds=0.2).offsets, 0.1)
    order = np.arange(len(fixed), dtype=np.int32)
    offsets = np.empty(len(fixed), np.int64)
    items = native(fixed)
    items.place(order, FIRST_FIT, offsets)
    before = items.verify(offsets)
    items.press(offsets, most_work=20_000_000, target=items.measure(), seed=0, stop=StopFlag())
    assert items.verify(offsets) < before


def test_a_layout_at_the_bound_is_pressed_no_further() -> None:
    starts = np.arange(9000)  # too many for another placement after pressing
    fixed = np.where(starts == 100, 1000, -1)
    lifetimes = Lifetimes(starts, starts + 2, np.full(len(starts), 10), fixed)
    layout = place(lifetimes, capacity=5)
    check(lifetimes, layout)
    assert layout.height == layout.lower_bound == 1010
    assert layout.offsets[100] == 1000


def test_a_layout_with_most_items_on_top_can_be_pressed() -> None:
    draw = np.random.default_rng(0)
    long_lived, count = 24, 300
    starts = draw.integers(0, 3 * count, long_lived)
    ends = starts + draw.integers(count, 3 * count, long_lived)
    times = 3 * np.arange(count)
    lifetimes = Lifetimes(
        np.concatenate([starts, times]),
        np.concatenate([ends, times + 3]),
        np.concatenate([draw.integers(200, 3000, long_lived), np.full(count, 2000)]),
    )
    items, offsets = native(lifetimes), np.empty(len(lifetimes), np.int64)
    order = np.argsort(lifetimes.starts - lifetimes.ends, kind="stable").astype(np.int32)
    items.place(order, FIRST_FIT, offsets)
    offsets[long_lived:] = (offsets + lifetimes.nbytes)[:long_lived].max()
    bound, before = items.measure(), items.verify(offsets)
    items.press(offsets, most_work=50_000_000, target=bound, seed=0, stop=StopFlag())
    assert items.verify(offsets) - bound < (before - bound) / 4


def test_pressed_packings_are_close_to_the_bound() -> None:
    count, excesses = 150, []
    for seed in range(8):
        lifetimes = draw_packing(seed, count, side=1 << 20)
        items, offsets = native(lifetimes), np.empty(count, np.int64)
        order = np.argsort(-lifetimes.nbytes, kind="stable").astype(np.int32)
        items.place(order, FIRST_FIT, offsets)
        items.press(offsets, most_work=40_000_000, target=items.measure(), seed=0, stop=StopFlag())
        excesses.append(items.verify(offsets) / items.measure() - 1)
    # Twice as much if the search goes on with most items out.
    assert np.mean(excesses) <= 0.015


def test_fixed_items_that_overlap_are_an_error() -> None:
    lifetimes = Lifetimes(np.array([0, 1]), np.array([3, 4]), np.array([8, 8]), np.array([0, 4]))
    with pytest.raises(InvalidArgument, match="item 1 overlaps another fixed item"):
        place(lifetimes)
    with pytest.raises(InvalidArgument, match="item 1 overlaps another fixed item"):
        layout_twin.place(lifetimes, np.array([0, 1], np.int32), FIRST_FIT)


def test_no_items_have_an_empty_layout() -> None:
    empty = np.zeros(0, np.int64)
    layout = place(Lifetimes(empty, empty, empty))
    assert (layout.height, layout.lower_bound, len(layout.offsets)) == (0, 0, 0)


def test_a_search_that_is_asked_to_stop_returns_the_best_so_far() -> None:
    lifetimes = draw_packing(11, 900, side=1 << 20)
    asked = []

    def should_stop() -> bool:
        asked.append(True)
        return True

    layout = place(lifetimes, tolerance=0, seconds=1000, capacity=1 << 20, should_stop=should_stop)
    check(lifetimes, layout)
    assert asked
    assert layout.height > layout.lower_bound  # there was no time for more


def test_an_error_of_should_stop_ends_the_search_and_is_raised() -> None:
    class GivenUp(BaseException):
        pass

    def should_stop() -> bool:
        raise GivenUp

    with pytest.raises(GivenUp):
        place(draw_packing(12, 900, side=1 << 20), tolerance=0, should_stop=should_stop)


def test_a_wrong_layout_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def place_all_at_zero(_self: NativeItems, _order: object, _fit: int, offsets: object) -> int:
        offsets[:] = 0  # type: ignore[index]
        return 0

    monkeypatch.setattr(NativeItems, "place", place_all_at_zero)
    with pytest.raises(CorruptState, match=r"items . and . overlap"):
        place(Lifetimes(np.array([0, 1]), np.array([3, 4]), np.array([8, 8])), capacity=8)


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1.0}, {"tolerance": -0.1}, {"capacity": -1}, {"seconds": float("nan")}]
)
def test_negative_limits_are_an_error(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match="must not be negative"):
        place(draw_lifetimes(1, 3), **wrong)  # type: ignore[arg-type]
