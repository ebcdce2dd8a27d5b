"""When items can be needed, and which of them share the steps of recomputing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swapkit.planning.bounds.windows import find_windows
from tests.unit.planning.bounds.test_bound import make_recomputable, make_three

if TYPE_CHECKING:
    from swapkit.simulation.problems import Problem


def find_earliest(problem: Problem, can_recompute: list[bool]) -> list[int]:
    return list(map(int, find_windows(problem, np.array(can_recompute)).earliest))


def make_pair(releases: list[int]) -> Problem:
    """Item 1 is made from item 0 and used before it, in slot 5."""
    return make_recomputable(
        [[0], [1]],
        inputs=np.array([0], np.int32),
        input_starts=np.array([0, 0, 1], np.int32),
        releases=np.array(releases, np.int32),
    )


def test_find_windows_when_an_item_is_made_from_another_then_that_is_needed_with_it() -> None:
    assert find_earliest(make_pair([0, 1]), [True, True]) == [5, 5]


def test_find_windows_when_the_item_made_is_not_recomputed_then_nothing_is_needed_early() -> None:
    assert find_earliest(make_pair([0, 1]), [True, False]) == [6, 5]


def test_find_windows_when_forward_still_needs_an_item_then_it_is_there_anyway() -> None:
    assert find_earliest(make_pair([5, 1]), [True, True]) == [6, 5]


def test_find_windows_when_one_operator_made_items_then_they_are_needed_together() -> None:
    assert find_earliest(make_recomputable([[0], [0]]), [True, True]) == [5, 5]


def test_find_windows_when_needs_are_passed_on_then_through_all_that_is_made() -> None:
    problem = make_three(
        can_recompute=np.array([True, True, True]),
        births=np.array([0, 1, 2], np.int32),
        readies=np.array([0, 1, 2], np.int32),
        releases=np.array([0, 1, 2], np.int32),
        uses=np.array([7, 6, 4], np.int32),
        own_steps=np.array([0, 1, 2], np.int32),
        step_seconds=np.ones(3),
        chain_starts=np.arange(4, dtype=np.int32),
        chain_steps=np.arange(3, dtype=np.int32),
        inputs=np.array([0, 1], np.int32),
        input_starts=np.array([0, 0, 1, 2], np.int32),
    )
    assert find_earliest(problem, [True, True, True]) == [4, 4, 4]


def test_find_windows_when_steps_may_run_together_then_they_are_shared() -> None:
    problem = make_recomputable(
        [[0, 1], [0, 2]],
        step_seconds=np.array([3.0, 0.25, 0.5]),
        uses=np.array([6, 6], np.int32),
    )
    windows = find_windows(problem, problem.can_recompute)
    assert windows.own_seconds.tolist() == [0.25, 0.5]
    assert windows.shared == ((3.0, (0, 1), 6, 6),)


def test_find_windows_when_steps_never_run_together_then_each_item_pays() -> None:
    problem = make_recomputable([[0, 1], [0, 2]], step_seconds=np.array([3.0, 0.25, 0.5]))
    windows = find_windows(problem, problem.can_recompute)
    assert windows.own_seconds.tolist() == [3.25, 3.5]
    assert windows.shared == ()
