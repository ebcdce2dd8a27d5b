"""Simulated steps, each small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit.errors import InvalidArgument
from swapkit.simulation.running import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK, Moments, run
from tests.unit.simulation.tiny import LINK, Item, actions, indexes, make_problem

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine


def limited(budget_bytes: int, **values: float) -> Machine:
    return replace(LINK, budget_bytes=budget_bytes, **values)  # type: ignore[arg-type]


def test_run_when_all_is_kept_then_time_and_memory_are_sums() -> None:
    problem = make_problem(3, Item(birth=0, use=2, nbytes=4), held=(1, 7, 2))
    result = run(problem, limited(11), actions(KEEP))
    assert (result.seconds, result.peak_bytes, result.stuck_slot) == (3.0, 11, -1)
    assert result.slot_starts.tolist() == [0, 1, 2]
    assert result.slot_ends.tolist() == [1, 2, 3]
    assert np.isnan(result.out_starts).all()
    assert result.prefetch_slots.tolist() == [-1]


def test_run_when_kept_does_not_fit_then_slot_that_is_stuck() -> None:
    problem = make_problem(3, Item(birth=0, use=2, nbytes=4), held=(1, 7, 2))
    result = run(problem, limited(10), actions(KEEP))
    assert result.stuck_slot == 1
    assert result.seconds == float("inf")
    assert result.slot_ends[0] == 1
    assert np.isnan(result.slot_starts[1])


def test_run_when_next_item_has_no_room_then_it_waits_for_the_copy_out() -> None:
    problem = make_problem(4, Item(birth=0, use=3, nbytes=3), Item(birth=1, use=2, nbytes=2))
    result = run(problem, limited(4), actions(SWAP, KEEP))
    assert (result.out_starts[0], result.out_ends[0], result.released[0]) == (1, 4, 4)
    assert result.slot_starts.tolist() == [0, 4, 5, 9]  # back from 6, when slot 2 gave its memory
    assert result.slot_stalls.tolist() == [0, 3, 0, 3]
    assert (result.in_starts[0], result.in_ends[0]) == (6, 9)
    assert (result.seconds, result.stall_seconds, result.swapped_bytes) == (10, 6, 3)
    assert (result.release_slots[0], result.prefetch_slots[0]) == (1, 3)


def test_run_when_bytes_are_final_before_last_use_then_copied_early_and_freed_late() -> None:
    problem = make_problem(
        6, Item(birth=0, release=2, use=5), Item(birth=3, use=4), held=(0, 0, 0, 0, 0, 0)
    )
    result = run(problem, limited(1), actions(SWAP, KEEP))
    assert (result.out_starts[0], result.out_ends[0]) == (1, 2)
    assert result.released[0] == 3  # the end of slot 2
    assert result.slot_stalls.tolist() == [0, 0, 0, 0, 0, 1]
    assert result.release_slots[0] == 3


def test_run_when_two_are_final_together_then_out_in_order_and_back_in_reverse() -> None:
    problem = make_problem(
        8,
        Item(birth=0, ready=1, use=6, nbytes=1),
        Item(birth=1, ready=1, use=6, nbytes=1),
        Item(birth=0, ready=0, use=7, nbytes=1),
    )
    result = run(problem, limited(100), actions(SWAP, SWAP, SWAP))
    assert result.out_starts.tolist() == [2, 3, 1]
    assert result.in_starts.tolist() == [5, 4, 6]  # of the first two the later born is first


def test_run_when_there_is_room_then_copy_back_is_early_but_takes_nothing_that_is_needed() -> None:
    # Slot 4 needs all 4 bytes that there are: the copy back has to wait until it is over.
    problem = make_problem(8, Item(birth=0, use=7, nbytes=2), held=(0, 0, 0, 0, 4, 0, 0, 0))
    result = run(problem, limited(4), actions(SWAP))
    assert result.out_ends[0] == 3
    assert (result.in_starts[0], result.prefetch_slots[0]) == (5, 5)
    assert result.stall_seconds == 0
    roomy = run(problem, limited(6), actions(SWAP))
    assert (roomy.in_starts[0], roomy.prefetch_slots[0]) == (3, 3)


def test_run_when_two_could_come_back_then_the_second_leaves_room_beside_the_first() -> None:
    # Both have room in slots 5 and 7, but beside what slot 6 holds there is room for one only.
    problem = make_problem(
        10,
        Item(birth=0, use=9, nbytes=2),
        Item(birth=0, use=8, nbytes=2),
        held=(0, 0, 0, 0, 0, 0, 2, 0, 0, 0),
    )
    machine = limited(4, in_bytes_per_second=4.0)
    result = run(problem, machine, actions(SWAP, SWAP))
    assert (result.in_starts[1], result.in_starts[0]) == (5, 7)


def test_run_when_item_is_back_then_the_next_has_to_go_for_a_later_slot() -> None:
    problem = make_problem(
        10,
        Item(birth=0, use=3, death=9),
        Item(birth=1, use=2, nbytes=2),
        Item(birth=4, use=9),
        Item(birth=6, use=7),
    )
    result = run(problem, limited(2), actions(SWAP, KEEP, SWAP, KEEP))
    assert result.release_slots.tolist() == [1, -1, 6, -1]


def test_run_when_item_comes_back_in_the_course_of_a_slot_then_its_beginning_has_it_not() -> None:
    # The first two have to go for slot 2. One is back at 4.5, the other then starts: with it, slot
    # 4 would not fit beside the third.
    problem = make_problem(
        9,
        Item(birth=0, use=6, nbytes=3),
        Item(birth=0, use=6, nbytes=3),
        Item(birth=3, use=7, nbytes=4),
        held=(0, 0, 8, 0, 2, 0, 0, 0, 0),
    )
    machine = limited(10, out_bytes_per_second=100.0, in_bytes_per_second=2.0)
    result = run(problem, machine, actions(SWAP, SWAP, SWAP))
    assert (result.in_starts[1], result.in_starts[0]) == (3, 4.5)
    assert result.release_slots.tolist() == [2, 2, -1]


def test_run_when_prefetch_is_given_then_not_before_it_and_never_after_the_need() -> None:
    problem = make_problem(7, Item(birth=0, use=6))
    for asked, started in ((4, 4.0), (0, 2.0), (6, 6.0), (-1, 6.0), (9, 6.0)):
        result = run(problem, LINK, actions(SWAP), Moments(prefetches=indexes([asked])))
        assert result.in_starts[0] == started, asked


def test_run_when_release_is_given_then_its_slot_waits_until_the_memory_is_free() -> None:
    problem = make_problem(8, Item(birth=0, use=7, nbytes=2, release=2))
    slow = replace(LINK, out_bytes_per_second=0.5)  # the copy runs from 1 to 5
    at_once = [0, 1, 2, 3, 4, 5, 6]
    for asked, starts in (
        (-1, at_once),
        (0, [0, 1, 2, 5, 6, 7, 8]),  # it is used until slot 2: 3 is the first that can wait
        (3, [0, 1, 2, 5, 6, 7, 8]),
        (4, [0, 1, 2, 3, 5, 6, 7]),
        (6, at_once),
    ):
        result = run(problem, slow, actions(SWAP), Moments(releases=indexes([asked])))
        assert result.released[0] == 5
        assert result.slot_starts[:7].tolist() == starts, asked


def test_run_when_slot_waits_for_a_transfer_then_it_takes_less_by_what_came_in_between() -> None:
    problem = make_problem(8, Item(birth=0, use=7, nbytes=2, release=2), waits={4: 1})
    slow = replace(LINK, out_bytes_per_second=0.5)  # the copy runs from 1 to 5
    assert run(problem, slow, actions(SWAP)).slot_starts[:7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    delayed = run(problem, slow, actions(SWAP), Moments(releases=indexes([3])))
    # The transfer that began with the end of slot 1 is done at 5, as without the stall of 2 s.
    assert delayed.slot_starts[:7].tolist() == [0, 1, 2, 5, 6, 6, 7]
    early = make_problem(8, Item(birth=0, use=7, nbytes=2, release=2), waits={4: 3})
    later = run(early, slow, actions(SWAP), Moments(releases=indexes([3])))
    assert later.slot_starts[:7].tolist() == [0, 1, 2, 5, 6, 7, 8]  # it began only after the stall


def test_run_when_step_begins_with_a_transfer_then_the_wait_ends_at_the_same_time() -> None:
    problem = make_problem(4, Item(birth=0, use=3, step=0), steps=(0.5,), waits={2: -1})
    result = run(problem, LINK, actions(RECOMPUTE))
    assert result.slot_ends.tolist() == [1, 2, 3, 4.5]


def test_run_when_item_is_recomputed_early_then_it_takes_memory_and_fills_the_wait() -> None:
    problem = make_problem(
        6,
        Item(birth=0, use=4, nbytes=3, step=0),
        held=(0, 0, 0, 5, 0, 0),
        steps=(0.75,),
        waits={3: 2},
    )
    late = run(problem, LINK, actions(RECOMPUTE))
    assert (late.seconds, late.peak_bytes, late.needs[0]) == (6.75, 5, 4)
    for asked in (3, 2):
        early = run(problem, LINK, actions(RECOMPUTE), Moments(earlies=indexes([asked])))
        assert early.seconds == (6 if asked == 3 else 6.75)
        assert (early.peak_bytes, early.needs[0]) == (8, asked)
        assert early.recompute_seconds == 0.75
    for asked in (-1, 0, 5):  # forward still uses it in slot 0, backward needs it in slot 4
        same = run(problem, LINK, actions(RECOMPUTE), Moments(earlies=indexes([asked])))
        assert same.needs[0] == 4
    kept = run(problem, LINK, actions(KEEP), Moments(earlies=indexes([3])))
    assert kept.seconds == 6


def test_run_when_recomputing_lasts_longer_than_the_wait_then_the_rest_counts() -> None:
    problem = make_problem(6, Item(birth=0, use=4, step=0), steps=(2.5,), waits={3: 2})
    result = run(problem, LINK, actions(RECOMPUTE), Moments(earlies=indexes([3])))
    assert result.seconds == 7.5


def test_run_when_copies_slow_down_computing_then_not_a_wait() -> None:
    problem = make_problem(6, Item(birth=0, use=5, nbytes=2), waits={2: 1})
    machine = replace(LINK, interference=1.0)  # the copy out lasts from 1 to 3, half of slot 1 to 2
    result = run(problem, machine, actions(SWAP), window=0)
    assert result.slot_ends[:4].tolist() == [1, 3, 4, 5]


def test_run_when_slot_waits_since_a_later_one_then_refused() -> None:
    with pytest.raises(InvalidArgument, match="slot 1 waits since slot 2"):
        run(make_problem(3, waits={1: 2}), LINK, actions())


def test_run_when_given_prefetch_would_take_a_waiting_slots_memory_then_it_waits() -> None:
    # From 2 to 5 slot 2 waits for all 4 bytes; 1 of them would be free for the copy back before.
    problem = make_problem(
        8,
        Item(birth=0, use=6, nbytes=1),
        Item(birth=1, use=7, nbytes=3),
        Item(birth=2, use=5, nbytes=4),
    )
    asked = indexes([0, 0, 0])
    result = run(problem, limited(4), actions(SWAP, SWAP, KEEP), Moments(prefetches=asked))
    assert result.slot_starts[2] == 5
    assert result.in_starts[0] == result.slot_ends[5]
    assert result.prefetch_slots[0] == 6


def test_run_when_window_is_given_then_copy_back_starts_inside_it() -> None:
    problem = make_problem(9, Item(birth=0, use=8))
    for window in (0, 1, 3):
        result = run(problem, LINK, actions(SWAP), window=window)
        assert result.prefetch_slots[0] == 8 - window
    assert run(problem, LINK, actions(SWAP)).prefetch_slots[0] == 2


def test_run_when_host_is_full_then_copy_out_waits_until_an_item_is_dead() -> None:
    problem = make_problem(
        8, Item(birth=0, use=3, nbytes=2), Item(birth=1, use=7, nbytes=2), held=(0,) * 8
    )
    machine = limited(100, host_bytes=3)
    result = run(problem, machine, actions(SWAP, SWAP))
    assert result.host_peak_bytes == 2
    assert result.out_starts[1] == result.slot_ends[3]
    assert run(problem, LINK, actions(SWAP, SWAP)).host_peak_bytes == 4


def test_run_when_item_goes_to_disk_then_at_its_speed_and_without_host_memory() -> None:
    problem = make_problem(16, Item(birth=0, use=15, nbytes=2))
    machine = limited(
        100,
        host_bytes=0,
        disk_bytes=2,
        disk_write_bytes_per_second=0.5,
        disk_read_bytes_per_second=0.25,
    )
    result = run(problem, machine, actions(SWAP_TO_DISK))
    assert result.out_ends[0] - result.out_starts[0] == 4
    assert result.in_ends[0] - result.in_starts[0] == 8
    assert (result.host_peak_bytes, result.disk_peak_bytes) == (0, 2)
    fast = replace(machine, disk_write_bytes_per_second=9.0, disk_read_bytes_per_second=9.0)
    result = run(problem, fast, actions(SWAP_TO_DISK))
    assert result.out_ends[0] - result.out_starts[0] == 2  # the link's
    small = replace(machine, disk_bytes=1)
    assert run(problem, small, actions(SWAP_TO_DISK)).stuck_slot == 15


def test_run_when_disk_is_full_then_copy_out_waits_until_an_item_is_dead() -> None:
    problem = make_problem(8, Item(birth=0, use=3), Item(birth=1, use=7))
    machine = limited(
        100, disk_bytes=1, disk_write_bytes_per_second=1.0, disk_read_bytes_per_second=1.0
    )
    result = run(problem, machine, actions(SWAP_TO_DISK, SWAP_TO_DISK))
    assert result.out_starts[1] == result.slot_ends[3]
    assert result.disk_peak_bytes == 1


def test_run_when_copies_have_latency_then_each_takes_it() -> None:
    problem = make_problem(9, Item(birth=0, use=8, nbytes=2))
    machine = limited(100, out_latency_seconds=0.5, in_latency_seconds=0.25)
    result = run(problem, machine, actions(SWAP))
    assert result.out_ends[0] == 1 + 2.5
    assert result.in_ends[0] == 3.5 + 2.25


def test_run_when_links_share_then_each_has_half_while_both_copy() -> None:
    # The first goes out from 1 to 3; then the second goes out while the first comes back.
    problem = make_problem(12, Item(birth=0, use=10, nbytes=2), Item(birth=0, use=11, nbytes=4))
    machine = limited(100, duplex=1.0)
    result = run(problem, machine, actions(SWAP, SWAP))
    assert (result.in_starts[0], result.out_starts[1]) == (3, 3)
    assert result.in_ends[0] == 7  # 2 bytes at half a byte a second
    assert result.out_ends[1] == 9  # 2 of 4 bytes until 7, the rest alone
    apart = run(problem, limited(100), actions(SWAP, SWAP))
    assert (apart.in_ends[0], apart.out_ends[1]) == (5, 7)


def test_run_when_copies_interfere_then_computing_is_slower_while_they_run() -> None:
    problem = make_problem(8, Item(birth=0, use=7))
    result = run(problem, limited(100, interference=0.5), actions(SWAP))
    # Copies run from 1 to 3, out and then in; two thirds of a second of work each.
    assert result.in_ends[0] == 3
    assert result.seconds == pytest.approx(1 + 2 + (7 - 4 / 3))
    assert result.slot_ends[1] == pytest.approx(2.5)
    assert result.slot_ends[2] == pytest.approx(3 + 2 / 3)


def test_run_when_recomputed_then_dropped_and_made_again_at_its_need() -> None:
    problem = make_problem(
        5, Item(birth=0, release=1, use=4, nbytes=3, step=0), held=(0, 0, 5, 0, 0), steps=(2.0,)
    )
    result = run(problem, limited(5), actions(RECOMPUTE))
    assert result.seconds == 7
    assert result.slot_ends[4] - result.slot_starts[4] == 3
    assert (result.recompute_seconds, result.peak_bytes) == (2, 5)
    assert run(problem, limited(5), actions(KEEP)).stuck_slot == 2


def test_run_when_recomputed_from_swapped_then_that_is_needed_earlier() -> None:
    problem = make_problem(
        6,
        Item(birth=0, use=5, step=0),
        Item(birth=1, use=3, step=1, inputs=(0,)),
        steps=(1.0, 1.0),
    )
    assert run(problem, LINK, actions(SWAP, SWAP)).needs.tolist() == [5, 3]
    assert run(problem, LINK, actions(SWAP, RECOMPUTE)).needs.tolist() == [3, 3]
    both = run(problem, LINK, actions(RECOMPUTE, RECOMPUTE))
    assert both.needs.tolist() == [3, 3]
    assert both.slot_ends[3] - both.slot_starts[3] == 3


def test_run_when_input_is_still_used_in_forward_then_it_is_there_anyway() -> None:
    problem = make_problem(
        6,
        Item(birth=0, release=3, use=5),
        Item(birth=1, use=3, step=0, inputs=(0,)),
        steps=(1.0,),
    )
    assert run(problem, LINK, actions(SWAP, RECOMPUTE)).needs.tolist() == [5, 3]


def test_run_when_siblings_are_recomputed_then_once_at_the_earliest_need() -> None:
    problem = make_problem(
        6,
        Item(birth=0, use=5, step=0, chain_bytes=2),
        Item(birth=0, use=3, step=0, chain_bytes=3),
        steps=(1.5,),
    )
    result = run(problem, LINK, actions(RECOMPUTE, RECOMPUTE))
    assert result.needs.tolist() == [3, 3]
    assert result.recompute_seconds == 1.5
    assert result.peak_bytes == 2 + 3  # both, and the larger of their chains
    alone = run(problem, LINK, actions(RECOMPUTE, KEEP))
    assert alone.needs.tolist() == [5, 3]


def test_run_when_items_share_a_step_in_a_slot_then_it_runs_once_and_again_in_another() -> None:
    steps = (1.0, 0.5, 0.25)
    first = Item(birth=0, use=3, step=1, chain=(0, 1), chain_bytes=4)
    second = Item(birth=1, use=3, step=2, chain=(0, 2), chain_bytes=5)
    both = actions(RECOMPUTE, RECOMPUTE)
    result = run(make_problem(4, first, second, steps=steps), LINK, both)
    assert result.recompute_seconds == 1.75
    assert result.peak_bytes == 2 + 4 + 5  # chains of different operators are there together
    apart = make_problem(4, first, replace(second, use=2, death=2), steps=steps)
    assert run(apart, LINK, both).recompute_seconds == 2.75


def test_run_when_item_is_from_before_the_step_then_out_from_the_start() -> None:
    state = Item(birth=0, ready=-1, release=-1, use=4, death=5, nbytes=2)
    problem = make_problem(6, state, held=(0, 3, 3, 0, 0, 0))
    result = run(problem, limited(3), actions(SWAP))
    assert (result.out_starts[0], result.released[0]) == (0, 2)
    assert result.slot_starts[1] == 2
    assert result.release_slots[0] == 1
    assert run(problem, limited(1), actions(SWAP)).stuck_slot == 0


def test_run_when_it_waits_then_the_lesser_of_both_slots_counts_beside_copies() -> None:
    # Slot 1 needs 5 bytes for itself and slot 2 none: the copy back fits before slot 2, at 3.
    problem = make_problem(3, Item(birth=0, use=2, nbytes=2), held=(0, 5, 0))
    result = run(problem, limited(5), actions(SWAP))
    assert (result.slot_starts[1], result.in_starts[0]) == (3, 4)
    assert result.peak_bytes == 5


@pytest.mark.parametrize("wrong", [actions(KEEP, KEEP), actions()])
def test_run_when_actions_are_too_many_or_few_then_invalid_argument(wrong: np.ndarray) -> None:
    problem = make_problem(3, Item(birth=0, use=2))
    with pytest.raises(InvalidArgument, match="for each of 1 items"):
        run(problem, LINK, wrong)
    with pytest.raises(InvalidArgument, match="for each of 1 items"):
        run(problem, LINK, actions(KEEP), Moments(prefetches=indexes([1, 2])))
    with pytest.raises(InvalidArgument, match="slot for each of 1 items"):
        run(problem, LINK, actions(KEEP), Moments(releases=indexes([1, 2])))


def test_run_when_item_cannot_have_the_action_then_invalid_argument() -> None:
    problem = make_problem(3, Item(birth=0, use=2))
    with pytest.raises(InvalidArgument, match="item 0 cannot have action 2"):
        run(problem, LINK, actions(RECOMPUTE))
    with pytest.raises(InvalidArgument, match="the machine has none"):
        run(problem, LINK, actions(SWAP_TO_DISK))
