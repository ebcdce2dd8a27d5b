"""What ranks agree on: here they are objects of one process, with one store."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed
import torch.testing._internal.distributed.fake_pg  # knows the backend "fake"

from swapkit._runtime.control.board import Board
from swapkit._runtime.control.rank_agreement import (
    MOST_NAMED,
    PATIENCE_STEPS,
    Ranks,
    Rounds,
    join_ranks,
)
from swapkit.errors import InfeasibleBudget
from swapkit.units import MOST_BYTES
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.control.rank_switch import RankSwitch

distributed: Any = torch.distributed
FLOOR_BYTES = 2 * MIB
STEP = "5e"  # the kind of steps
OTHER_STEP = "07"


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="swapkit")


@pytest.fixture
def group() -> Iterator[None]:
    """Two ranks, as far as torch knows: the other never comes."""
    distributed.init_process_group("fake", store=distributed.HashStore(), rank=0, world_size=2)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def make_ranks(count: int, store: Any = None) -> list[Ranks]:
    shared = distributed.HashStore() if store is None else store
    boards = [Board(lambda: shared, rank=rank, count=count) for rank in range(count)]
    return [Ranks(Rounds(each), "parts") for each in boards]


def agree(
    ranks: Ranks, budget_bytes: int = 8 * MIB, floor_bytes: int = FLOOR_BYTES, step: str = STEP
) -> bool:
    return ranks.agree(budget_bytes, lambda: floor_bytes, step)


def test_ranks_when_all_have_said_it_then_the_smallest_budget_is_everyones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, third = all_ranks = make_ranks(3)
    assert not agree(first, 8 * MIB, 1 * MIB)
    assert not agree(second, 6 * MIB, 3 * MIB)
    assert agree(third, 7 * MIB, 2 * MIB)
    assert agree(first)
    assert agree(second)
    assert [each.find_budget(8 * MIB) for each in all_ranks] == [6 * MIB] * 3
    said = "all 3 ranks agree: budget 6.00 MiB (rank 1), floor 3.00 MiB (rank 1)"
    assert caplog.messages == [said] * 3


def test_ranks_when_steps_are_of_two_kinds_then_those_alike_agree_and_the_other_plans_for_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    all_ranks = make_ranks(3)
    for ranks, budget, step in zip(all_ranks, (8, 2, 7), (STEP, OTHER_STEP, STEP), strict=True):
        agree(ranks, budget * MIB, 1 * MIB, step)
    for ranks, step in zip(all_ranks, (STEP, OTHER_STEP, STEP), strict=True):
        assert agree(ranks, step=step)
    assert [each.find_budget(2 * MIB) // MIB for each in all_ranks] == [7, 2, 7]
    alike = "2 ranks that do the same agree: budget 7.00 MiB (rank 2), floor 1.00 MiB (rank 0)"
    alone = "rank 1 plans for its own budget: no other rank does the same"
    assert sorted(caplog.messages) == [alike, alike, alone]


def test_ranks_when_one_of_another_kind_needs_more_then_it_denies_the_others_nothing() -> None:
    all_ranks = make_ranks(3)
    for ranks, floor, step in zip(all_ranks, (1, 9, 5), (STEP, OTHER_STEP, STEP), strict=True):
        agree(ranks, 6 * MIB, floor * MIB, step)
    for ranks, step in zip(all_ranks, (STEP, OTHER_STEP, STEP), strict=True):
        assert agree(ranks, step=step)
        assert ranks.find_budget(6 * MIB) == 6 * MIB


def test_ranks_when_their_steps_become_other_ones_then_former_needs_deny_nothing() -> None:
    first, second = make_ranks(2)
    agree(first, 6 * MIB, 9 * MIB)
    agree(second, 6 * MIB, 1 * MIB)
    for ranks in first, second:
        assert agree(ranks)
        with pytest.raises(InfeasibleBudget):
            ranks.find_budget(6 * MIB)
        ranks.forget_floors()
        assert ranks.find_budget(6 * MIB) == 6 * MIB


def test_part_in_a_change_when_ranks_do_the_same_then_they_share_it_and_others_have_none() -> None:
    all_ranks = make_ranks(3)
    first, second, third = all_ranks

    def switch(ranks: Ranks, members: tuple[int, ...]) -> RankSwitch | None:
        return ranks.make_switch(members, [], ())

    assert switch(first, (0, 1)) is None  # nothing is agreed on yet
    for ranks, step in zip(all_ranks, (STEP, STEP, OTHER_STEP), strict=True):
        agree(ranks, step=step)
    for ranks, step in zip(all_ranks, (STEP, STEP, OTHER_STEP), strict=True):
        assert agree(ranks, step=step)
    made = [each for ranks in (first, second) if (each := switch(ranks, (0, 1))) is not None]
    assert [each.proposes for each in made] == [True, False]
    assert len({each._topic for each in made}) == 1
    assert switch(first, (0, 1, 2)) is None
    assert switch(third, (0, 1)) is None
    assert first.find_smallest_budget(99 * MIB) == 8 * MIB


def test_ranks_when_some_have_said_nothing_then_no_plan_and_the_floor_is_found_once() -> None:
    first, second = make_ranks(2)
    found = []

    def find_floor() -> int:
        found.append(FLOOR_BYTES)
        return FLOOR_BYTES

    for _ in range(3):
        assert not first.agree(8 * MIB, find_floor, STEP)
    assert agree(second, 4 * MIB)
    assert first.agree(8 * MIB, find_floor, STEP)
    assert first.agree(8 * MIB, find_floor, STEP)
    assert first.find_budget(8 * MIB) == 4 * MIB
    assert found == [FLOOR_BYTES]


@pytest.mark.parametrize("count", [2, 3, MOST_NAMED + 3])
def test_ranks_when_patience_ends_then_those_that_are_silent_are_named_and_one_goes_on(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_ranks(count)[0]
    for _ in range(PATIENCE_STEPS - 1):
        assert not agree(first)
    assert caplog.messages == []
    assert agree(first)
    assert agree(first)
    assert first.find_budget(8 * MIB) == 8 * MIB
    (message,) = caplog.messages
    silent = {2: "rank 1", 3: "ranks 1, 2"}.get(count, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more")
    assert message == (
        f"rank 0 plans for its own budget: after {PATIENCE_STEPS} recorded steps, no budget "
        f"has arrived from {silent}, which may have no session that plans"
    )


def test_ranks_when_the_last_one_speaks_as_patience_ends_then_they_agree() -> None:
    store = distributed.HashStore()
    first, second = make_ranks(2, store)

    class Late:
        """Says that not all have spoken, and then that all have."""

        def multi_get(self, keys: list[str]) -> list[bytes]:
            said: list[bytes] = store.multi_get(keys)
            if first._steps == PATIENCE_STEPS:
                agree(second, 4 * MIB)
            return said

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    late: Any = Late()
    first.rounds.board._find_store = lambda: late
    assert [agree(first) for _ in range(PATIENCE_STEPS)] == [False] * (PATIENCE_STEPS - 1) + [True]
    assert first.find_budget(8 * MIB) == 4 * MIB


def publish(store: Any, figures: Any, *, number: int = 0) -> None:
    """Have rank 1 speak in a round."""
    session = ["parts", "swapkit/parts/0", number, figures, False]
    store.set("swapkit/sessions/rank-1", json.dumps([session]))


@pytest.mark.parametrize(
    "figures",
    [
        "8 5 5e",
        [],
        [8],
        [8, 5],
        [0, 5, "5e"],
        [8, -5, "5e"],
        [8, 5, "5e", 3],
        [8, 5, 5],
        [8, True, "5e"],
        [8.0, 5, "5e"],
        ["8", 5, "5e"],
        [MOST_BYTES + 1, 5, "5e"],
        [8, MOST_BYTES + 1, "5e"],
    ],
)
def test_ranks_when_one_publishes_something_else_then_warned_once_and_this_one_goes_on(
    figures: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = distributed.HashStore()
    first = make_ranks(2, store)[0]
    publish(store, figures)
    assert agree(first)
    assert agree(first)
    assert first.find_budget(8 * MIB) == 8 * MIB
    (message,) = caplog.messages
    assert message.startswith("cannot read the budgets of other ranks, so this rank plans for its ")
    assert "rank 1 published b'" in message
    assert message.endswith("Use the same version on all ranks")


def test_ranks_when_a_floor_is_above_the_smallest_budget_then_all_say_whose_and_what_to_try() -> (
    None
):
    all_ranks = make_ranks(3)
    for ranks, budget, floor in zip(all_ranks, (8, 4, 6), (1, 2, 5), strict=True):
        agree(ranks, budget * MIB, floor * MIB)
    for ranks in all_ranks:
        assert agree(ranks)
        with pytest.raises(InfeasibleBudget) as caught:
            ranks.find_budget(8 * MIB)
        assert caught.value.least_bytes == 5 * MIB
        assert str(caught.value) == (
            "no plan fits the budget of all 3 ranks, 4.00 MiB (rank 1): rank 2 needs at least "
            "5.00 MiB (5242880 bytes). Try that budget on all ranks, a smaller batch or shorter "
            "sequences"
        )


@pytest.mark.usefixtures("group")
def test_ranks_when_there_is_no_store_any_more_then_warned_once_and_one_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = join_ranks(lambda: "parts")
    assert ranks is not None
    assert not agree(ranks)
    distributed.destroy_process_group()
    assert agree(ranks)
    assert agree(ranks)
    assert ranks.find_budget(8 * MIB) == 8 * MIB
    (message,) = caplog.messages
    assert message.startswith("cannot read the budgets of other ranks, so ")


@pytest.mark.usefixtures("group")
def test_sessions_when_they_follow_each_other_then_each_agrees_anew() -> None:
    shared = distributed.distributed_c10d._get_default_store()
    for number in range(2):
        ranks = join_ranks(lambda: "parts")
        assert ranks is not None
        assert not agree(ranks, 4 * MIB)
        own = json.loads(shared.get("swapkit/sessions/rank-0"))
        figures = [4 * MIB, FLOOR_BYTES, STEP]
        assert own == [["parts", "swapkit/parts/0", number, figures, False]]
        publish(shared, [3 * MIB, 0, STEP], number=number)
        assert agree(ranks)
        assert ranks.find_budget(4 * MIB) == 3 * MIB
        ranks.leave()


@pytest.mark.usefixtures("group")
def test_session_when_another_process_group_comes_then_it_joins_that_and_stays_until_then() -> None:
    first = join_ranks(lambda: "parts")
    assert first is not None
    assert join_ranks(lambda: "other parts", first) is first
    distributed.destroy_process_group()
    assert join_ranks(lambda: "parts", first) is first
    assert agree(first)  # alone: its store is gone
    store = distributed.HashStore()
    distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    second = join_ranks(lambda: "parts", first)
    assert second is not None
    assert second is not first
    assert not agree(second)
    publish(distributed.distributed_c10d._get_default_store(), [3 * MIB, 0, STEP])
    assert agree(second)
    assert second.find_budget(4 * MIB) == 3 * MIB


def test_ranks_when_there_are_no_others_then_none() -> None:
    assert join_ranks(lambda: "parts") is None
    distributed.init_process_group("fake", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert join_ranks(lambda: "parts") is None
    finally:
        distributed.destroy_process_group()
