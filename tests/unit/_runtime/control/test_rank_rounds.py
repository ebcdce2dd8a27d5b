"""Sessions of several ranks, some of which only one has: here ranks are objects of one process."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import pytest
import torch.distributed

from swapkit._runtime.control import board
from swapkit._runtime.control.board import Board
from swapkit._runtime.control.rank_agreement import PATIENCE_STEPS, Figures, Ranks, Rounds
from tests.support import MIB

distributed: Any = torch.distributed


class Process:
    """A rank, with its sessions."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self.rank = rank
        self.rounds = Rounds(Board(lambda: store, rank=rank, count=count))

    def enter(self, parts: str = "parts") -> Ranks:
        return Ranks(self.rounds, parts)

    def spend_alone(self, steps: int) -> None:
        """Have a session that the other ranks do not have."""
        alone = self.enter()
        for _ in range(steps):
            agree(alone, 1)
        alone.leave()


def agree(ranks: Ranks, budget: int) -> bool:
    return ranks.agree(budget * MIB, lambda: 0, "5e")


def start(count: int = 2, store: Any = None) -> list[Process]:
    shared = distributed.HashStore() if store is None else store
    return [Process(shared, rank, count) for rank in range(count)]


def assert_agreed(sessions: list[Ranks], budget: int = 4) -> None:
    """Have sessions of all ranks agree on a budget that the last one has."""
    for ranks in sessions[:-1]:
        assert not agree(ranks, budget + 1)
    for ranks in sessions[::-1]:
        assert agree(ranks, budget)
        assert ranks.find_budget(9 * MIB) == budget * MIB


def assert_in_step(processes: list[Process]) -> None:
    """Have all ranks enter a session and agree, twice."""
    for budget in 4, 3:
        sessions = [process.enter() for process in processes]
        assert_agreed(sessions, budget)
        for ranks in sessions:
            ranks.leave()


@pytest.mark.parametrize("steps", [0, 1, PATIENCE_STEPS, PATIENCE_STEPS + 3])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("extra", [1, 2, 5])
def test_sessions_when_one_rank_had_more_before_then_those_of_all_agree(
    steps: int, count: int, extra: int
) -> None:
    processes = start(count)
    for at in (0, count - 1):
        for _ in range(extra):
            processes[at].spend_alone(steps)
        assert_in_step(processes)


def test_sessions_when_two_are_open_then_each_agrees_with_the_one_that_speaks_as_early() -> None:
    first, second = start()
    early, late = ([process.enter() for process in (first, second)] for _ in range(2))
    assert not agree(late[0], 7)
    assert not agree(early[0], 6)
    assert agree(late[1], 8)
    assert agree(early[1], 5)
    assert [each.find_budget(9 * MIB) for each in (early[1], late[1])] == [5 * MIB, 7 * MIB]


def test_sessions_when_one_rank_has_one_that_never_speaks_then_those_that_train_agree() -> None:
    first, second = start()
    evaluation = first.enter()
    assert_agreed([first.enter(), second.enter()])
    evaluation.leave()


def test_sessions_when_they_train_other_parts_then_none_waits_for_the_others() -> None:
    processes = start(3)
    stages = [process.enter(f"stage{process.rank}") for process in processes]
    for ranks, budget in zip(stages, (6, 5, 4), strict=True):
        assert agree(ranks, budget)
        assert ranks.find_budget(budget * MIB) == budget * MIB


def test_sessions_when_one_rank_trains_something_else_then_the_others_agree_without_it() -> None:
    first, second, third = start(3)
    other = second.enter("other")
    assert_agreed([first.enter(), third.enter()])
    assert agree(other, 1)


def test_session_when_a_rank_has_no_session_yet_then_it_may_be_alike_and_is_awaited() -> None:
    first, second = start()
    early = first.enter()
    assert not agree(early, 6)
    second.enter("other").leave()
    assert not agree(early, 6)
    late = second.enter()
    assert agree(late, 4)
    assert agree(early, 6)
    assert early.find_budget(6 * MIB) == 4 * MIB


def test_session_when_those_alike_have_agreed_without_it_then_it_plans_alone_at_once() -> None:
    first, second = start()
    other, early = second.enter("other"), first.enter()
    assert agree(early, 6)
    assert agree(second.enter(), 4)
    assert agree(other, 1)


def test_sessions_when_one_is_only_here_then_those_after_it_agree() -> None:
    first, second = start()
    alone, ours, theirs = first.enter(), first.enter(), second.enter()
    assert not agree(alone, 1)
    agree(theirs, 4)
    agree(ours, 4)
    for ranks in (alone, ours, theirs):
        ranks.leave()
    assert_in_step([first, second])


def test_session_when_another_rank_s_has_ended_then_what_that_said_counts_no_more() -> None:
    first, second = start()
    first.spend_alone(3)
    late = second.enter()
    assert not agree(late, 4)
    ours = first.enter()
    assert agree(ours, 5)
    assert agree(late, 4)
    assert [each.find_budget(9 * MIB) for each in (ours, late)] == [4 * MIB, 4 * MIB]


def test_session_when_another_rank_s_ends_meanwhile_then_patience_is_no_longer() -> None:
    first, second, _ = start(3)
    waiting = first.enter()
    for step in range(PATIENCE_STEPS - 1):
        assert not agree(waiting, 4)
        if step % 3 == 0:
            second.spend_alone(1)
    assert agree(waiting, 4)
    assert waiting.find_budget(4 * MIB) == 4 * MIB


def test_session_when_it_was_dropped_then_the_next_one_says_its_own() -> None:
    first, second = start()
    dropped = first.enter()
    assert not agree(dropped, 1)
    del dropped
    gc.collect()
    assert_agreed([first.enter(), second.enter()])


def test_session_when_it_has_ended_then_nothing_is_said_or_heard() -> None:
    store = distributed.HashStore()
    first, second = start(2, store)
    ended = first.enter()
    ended.leave()
    ended.leave()
    assert agree(ended, 4)
    assert ended.find_budget(4 * MIB) == 4 * MIB
    figures = Figures(budget_bytes=4, floor_bytes=0, step="5e")
    assert ended.rounds.agree(ended._session, figures) == ({}, [])
    assert store.get("swapkit/sessions/rank-0") == b"[]"
    assert store.num_keys() == 1
    assert_in_step([first, second])


def test_session_when_it_ends_after_all_have_spoken_then_they_have_agreed() -> None:
    first, second = start()
    ours, theirs = first.enter(), second.enter()
    assert not agree(ours, 5)
    assert agree(theirs, 4)
    ours.leave()
    assert theirs.find_budget(5 * MIB) == 4 * MIB
    theirs.leave()
    assert_in_step([first, second])


@pytest.mark.parametrize("seed", range(60))
def test_sessions_when_ranks_have_others_at_random_then_those_after_agree(seed: int) -> None:
    chance = random.Random(seed)
    processes = start(chance.choice([2, 3]))
    for _ in range(3):
        opened: list[Ranks] = []
        for _ in range(chance.randrange(30)):
            if opened and chance.random() < 0.5:
                ranks = chance.choice(opened)
                agree(ranks, chance.randrange(1, 9))
                if chance.random() < 0.3:
                    ranks.leave()
            else:
                opened.append(chance.choice(processes).enter())
        for ranks in opened:
            ranks.leave()
        assert_in_step(processes)


@pytest.mark.parametrize(
    "listed", ["", "5", "[5]", "[[]]", '[["parts", "", 0, null, false, 9]]', '[["parts", "", 0]]']
)
def test_session_when_another_rank_lists_something_else_then_warned_and_it_goes_on_alone(
    listed: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = distributed.HashStore()
    ours = start(2, store)[0].enter()
    store.set("swapkit/sessions/rank-1", listed)
    assert agree(ours, 4)
    assert ours.find_budget(4 * MIB) == 4 * MIB
    assert "cannot read the budgets of other ranks, so this rank plans for its" in caplog.text


class Hung:
    """A store whose host hangs, as soon as it is to."""

    def __init__(self) -> None:
        self.store = distributed.HashStore()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __getattr__(self, name: str) -> Any:
        assert self.goes_on.wait(20)
        return getattr(self.store, name)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_session_when_the_store_s_host_hangs_then_it_goes_on_alone_and_ends_without_waiting(
    steps_before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board, "ANSWER_SECONDS", 0.05)
    hung = Hung()
    first = start(2, hung)[0]
    ranks = first.enter()
    for _ in range(steps_before):
        assert not agree(ranks, 4)
    hung.goes_on.clear()
    assert agree(ranks, 4)
    assert ranks.find_budget(4 * MIB) == 4 * MIB
    assert "its own budget: the process group's store has not answered for 0 seconds" in caplog.text
    ranks.leave()
    assert agree(first.enter(), 4)
    hung.goes_on.set()


HOSTILE = (
    "",
    "[" * 100_000,
    "9" * 5000,
    "[[1]]",
    '[["parts", "place", "round", null, false]]',
    '[["parts", 1, 1, null, false]]',
    '[["parts", "place", -1, null, false]]',
    '[["parts", "place", 0, "plenty", false]]',
    '{"a": 1}',
    "[]" + " " * (4 << 20),
)


@pytest.mark.parametrize("where", ["list", "outcome"])
@pytest.mark.parametrize("text", [*HOSTILE, "[0, 7]", "[[0]]", "[true]", '[["0"]]'])
def test_texts_when_another_rank_writes_something_else_then_this_one_goes_on_alone(
    where: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = distributed.HashStore()
    process, other = start(store=store)
    ranks = process.enter()
    if where == "outcome":
        other.enter()
        assert not agree(ranks, 4)
    over = "swapkit/parts/0/0/over"
    store.set("swapkit/sessions/rank-1" if where == "list" else over, text)
    assert agree(ranks, 4)
    assert ranks.find_budget(9 * MIB) == 9 * MIB
    assert "cannot read the budgets of other ranks" in caplog.text
