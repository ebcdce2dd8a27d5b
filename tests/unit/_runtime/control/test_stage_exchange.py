"""What stages tell each other; here ranks are objects of one process."""

from __future__ import annotations

import gc
import json
import logging
import threading
from concurrent.futures import wait
from typing import Any

import pytest
import torch.distributed

from swapkit._runtime.control.board import Board
from swapkit._runtime.control.stages import MOST_STEPS, StageExchange, StageTimes, find_board
from swapkit.ir.traces import StagePlace

distributed: Any = torch.distributed
STEPS = 8  # until all ranks have heard each other


def times_of(rank: int, work: float = 1.0) -> StageTimes:
    return StageTimes(stages=(rank,), work_seconds=work + rank, step_seconds=10.0)


class Rank:
    """A rank with a session that is a stage of a pipeline."""

    def __init__(self, store: Any, rank: int, ranks: tuple[int, ...]) -> None:
        self.rank = rank
        self.board = Board(lambda: store, rank=rank, count=4)
        self.place = StagePlace((ranks.index(rank),), len(ranks), ranks)
        self.times: StageTimes | None = times_of(rank)
        self.exchange = self.join()

    def join(self) -> StageExchange:
        return StageExchange(self.board, self.place)

    def step(self) -> dict[int, StageTimes]:
        return step(self.exchange, self.times)


def step(exchange: StageExchange, times: StageTimes | None) -> dict[int, StageTimes]:
    """End a step; wait until this rank has written, and read the others."""
    found = exchange.end_step(times)
    answer = exchange._answer
    if answer is not None:
        wait([answer], 20)
    return found


def leave(exchange: StageExchange) -> None:
    """Withdraw, and wait until that is written: a thread of its own does it."""
    exchange.leave()
    for thread in threading.enumerate():
        if thread.name == "swapkit-store":
            thread.join(20)


def start(*pipelines: tuple[int, ...], store: Any = None) -> list[Rank]:
    shared = distributed.HashStore() if store is None else store
    return [Rank(shared, rank, ranks) for ranks in pipelines for rank in ranks]


def run(ranks: list[Rank], steps: int = STEPS) -> list[dict[int, StageTimes]]:
    """Run steps of all ranks; return what each knows after the last."""
    for _ in range(steps):
        found = [rank.step() for rank in ranks]
    return found


def everything(ranks: list[Rank]) -> dict[int, StageTimes]:
    return {rank.rank: rank.times for rank in ranks if rank.times is not None}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_times_when_all_stages_have_said_theirs_then_each_knows_all(count: int) -> None:
    ranks = start(tuple(range(count)))
    assert run(ranks) == [everything(ranks)] * count


def test_times_when_a_stage_has_no_session_then_nothing_is_known() -> None:
    ranks = start((0, 1, 2))
    assert run(ranks[:2], 20) == [{}, {}]


def test_times_when_a_stage_is_late_then_known_once_it_has_come() -> None:
    ranks = start((0, 1, 2))
    run(ranks[:2], 20)
    assert run(ranks, 40) == [everything(ranks)] * 3


def test_times_when_there_are_two_pipelines_then_each_knows_its_own() -> None:
    ranks = start((0, 2), (1, 3))
    found = run(ranks)
    assert found == [everything(ranks[:2])] * 2 + [everything(ranks[2:])] * 2


def test_times_when_a_stage_has_another_plan_then_all_know_it_and_nothing_meanwhile() -> None:
    ranks = start((0, 1))
    run(ranks)
    ranks[0].times = None  # it is recorded again
    assert ranks[0].step() == {}
    assert run(ranks, MOST_STEPS) == [{}, {}]
    ranks[0].times = times_of(0, work=5.0)
    assert run(ranks, MOST_STEPS) == [everything(ranks)] * 2


def test_times_when_a_stage_has_ended_its_session_then_they_are_no_longer_known() -> None:
    ranks = start((0, 1))
    run(ranks)
    leave(ranks[0].exchange)
    assert run(ranks[1:], MOST_STEPS) == [{}]
    assert ranks[0].exchange.end_step(times_of(0)) == {}


def test_times_when_a_store_has_those_of_former_sessions_then_only_the_present_ones_count() -> None:
    """As if the store outlived a process group: nobody withdrew anything."""
    store = distributed.HashStore()
    former = start((0, 1), store=store)
    run(former)
    ranks = start((0, 1), store=store)
    assert run(ranks[:1], 20) == [{}]
    ranks[0].times = times_of(0, work=7.0)
    assert run(ranks, 40) == [everything(ranks)] * 2


def test_times_when_two_sessions_train_pipelines_of_the_same_ranks_then_each_has_its_own() -> None:
    ranks = start((0, 1))
    others = [rank.join() for rank in ranks]
    for _ in range(STEPS):
        run(ranks, 1)
        pairs = zip(others, ranks, strict=True)
        found = [step(each, times_of(rank.rank, work=9.0)) for each, rank in pairs]
    assert found == [{rank: times_of(rank, work=9.0) for rank in (0, 1)}] * 2
    assert run(ranks, 1) == [everything(ranks)] * 2


def test_session_when_it_was_dropped_then_the_next_one_has_its_name() -> None:
    (rank, _) = start((0, 1))
    name = rank.exchange.topic
    assert rank.join().topic == name[:-1] + "1"
    gc.collect()
    del rank.exchange
    gc.collect()
    assert rank.join().topic == name


class Counted:
    """A store that counts requests, and may hang."""

    def __init__(self) -> None:
        self.store = distributed.HashStore()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        assert self.goes_on.wait(20)
        self.writes += name == "set"
        return getattr(self.store, name)


def test_looks_when_nothing_changes_then_they_are_rare_and_come_more_often_after_news() -> None:
    store = Counted()
    ranks = start((0, 1), store=store)
    run(ranks, 4 * MOST_STEPS)
    before = store.writes
    run(ranks, 4 * MOST_STEPS)
    assert store.writes - before == 2 * 4
    ranks[0].times = times_of(0, work=3.0)
    before = store.writes
    ranks[0].step()
    assert run(ranks[:1], 1) == [everything(ranks)]
    assert store.writes > before


def test_session_when_the_store_hangs_then_no_step_waits_and_nothing_more_is_asked() -> None:
    store = Counted()
    ranks = start((0, 1), store=store)
    run(ranks)
    store.goes_on.clear()
    ranks[0].times = times_of(0, work=3.0)
    threads = threading.active_count()
    for _ in range(100):
        ranks[0].exchange.end_step(ranks[0].times)
    assert threading.active_count() <= threads + 2  # a request, and what waits for it
    ranks[0].exchange.leave()
    store.goes_on.set()


def test_session_when_the_process_group_is_gone_then_it_goes_on_without_the_others() -> None:
    def find_store() -> Any:
        raise ValueError("the process group no longer exists")

    exchange = StageExchange(Board(find_store, rank=0, count=2), StagePlace((0,), 2, (0, 1)))
    for _ in range(5):
        assert step(exchange, times_of(0)) == {}
    assert exchange._is_over


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "nonsense",
        '["m", {}]',
        "[5, {}, null]",
        '["m", [], null]',
        '["m", {"1": 5}, null]',
        '["m", {}, [[0], 1.0]]',
        '["m", {}, [[], 1.0, 1.0]]',
        '["m", {}, [["a"], 1.0, 1.0]]',
        '["m", {}, [[0], NaN, 1.0]]',
        '["m", {}, [[0], 1.0, Infinity]]',
        '["m", {}, [[0], -1, 1.0]]',
        '["m", {}, [[0], 1' + "0" * 400 + ", 1.0]]",
        "[" * 100_000,
        '["m", {}, null]' + " " * (4 << 20),
    ],
)
def test_session_when_another_stage_says_something_else_then_warned_once_and_it_goes_on(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = distributed.HashStore()
    rank = start((0, 1), store=store)[0]
    store.set(f"{rank.exchange.topic}/rank-1", text)
    with caplog.at_level(logging.WARNING, logger="swapkit"):
        assert run([rank], 5) == [{}]
    (message,) = caplog.messages
    assert message.startswith("rank 0 plans without the other stages: rank 1 published ")
    assert "Use the same version on all ranks" in message


def test_text_when_published_then_it_has_the_times_and_the_marks_of_others() -> None:
    store = distributed.HashStore()
    ranks = start((0, 1), store=store)
    run(ranks)
    mark, marks, times = json.loads(store.get(f"{ranks[0].exchange.topic}/rank-0"))
    assert mark == ranks[0].exchange._note.mark
    assert marks == {"1": ranks[1].exchange._note.mark}
    assert times == [[0], 1.0, 10.0]


def test_board_when_there_is_one_rank_then_none() -> None:
    assert find_board() is None
