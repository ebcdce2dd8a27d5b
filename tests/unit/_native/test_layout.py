"""The handle of layouts: arrays in, offsets out; the stop flag; errors of wrong arguments."""

from __future__ import annotations

import threading
import time
from array import array

import pytest

from swapkit._native.layout import (
    BEST_FIT,
    FIRST_FIT,
    FOUND,
    IMPOSSIBLE,
    MOST_EXACT,
    RULES,
    NativeItems,
    StopFlag,
)
from swapkit.errors import CorruptState, InvalidArgument


def make(rows: list[tuple[int, int, int]], fixed: list[int] | None = None) -> NativeItems:
    starts, ends, nbytes = (array("q", column) for column in zip(*rows, strict=True))
    return NativeItems(starts, ends, nbytes, None if fixed is None else array("q", fixed))


STAIRCASE = [(0, 2, 4), (1, 3, 2), (2, 4, 4), (0, 4, 1)]


def test_items_are_placed_at_the_lowest_gap_in_the_given_order() -> None:
    items, offsets = make(STAIRCASE), array("q", [0] * 4)
    assert items.place(array("i", range(4)), FIRST_FIT, offsets) > 0
    assert offsets.tolist() == [0, 4, 0, 6]
    assert items.verify(offsets) == items.measure() == 7


def test_best_fit_takes_the_smallest_gap() -> None:
    rows = [(0, 1, 4), (0, 1, 2), (0, 1, 1)]
    items, offsets = make(rows, fixed=[3, 8, -1]), array("q", [0] * 3)
    items.place(array("i", range(3)), BEST_FIT, offsets)
    assert offsets.tolist() == [3, 8, 7]
    items.place(array("i", range(3)), FIRST_FIT, offsets)
    assert offsets.tolist() == [3, 8, 0]


@pytest.mark.parametrize("rule", range(RULES))
def test_an_exact_search_finds_a_layout_or_proves_that_there_is_none(rule: int) -> None:
    items, offsets = make(STAIRCASE), array("q", [0] * 4)
    stop = StopFlag()
    assert items.search(7, rule, offsets, most_work=1000, stop=stop) == FOUND
    assert items.verify(offsets) == 7
    assert items.search(6, rule, offsets, most_work=1000, stop=stop) == IMPOSSIBLE


def test_an_exact_search_refuses_too_many_items() -> None:
    count = MOST_EXACT + 1
    items = make([(0, 1, 1)] * count)
    with pytest.raises(InvalidArgument, match=f"at most {MOST_EXACT} items"):
        items.search(count, 0, array("q", [0] * count), most_work=1, stop=StopFlag())


def test_a_search_ends_when_another_thread_sets_the_flag() -> None:
    rows = [(k % 7, k % 7 + 1 + k % 5, 1 + k * k % 91) for k in range(300)]
    items, offsets = make(rows), array("q", [0] * 300)
    items.place(array("i", range(300)), FIRST_FIT, offsets)
    stop = StopFlag()
    ended = threading.Event()

    def search() -> None:
        items.press(offsets, most_work=1 << 62, target=0, seed=0, stop=stop)
        ended.set()

    thread = threading.Thread(target=search)
    thread.start()
    time.sleep(0.05)  # the search has begun, and does not end by itself
    assert not ended.is_set()
    stop.set()
    thread.join(60)
    assert ended.is_set()
    assert stop.is_set
    items.verify(offsets)


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(InvalidArgument, match="item 0 ends before it starts"):
        make([(1, 1, 8)])
    items = make(STAIRCASE)
    with pytest.raises(InvalidArgument, match="out of range or twice"):
        items.place(array("i", [0, 0, 1, 2]), FIRST_FIT, array("q", [0] * 4))
    with pytest.raises(CorruptState, match="items . and . overlap".replace(".", r"\d")):
        items.verify(array("q", [0, 0, 0, 0]))
