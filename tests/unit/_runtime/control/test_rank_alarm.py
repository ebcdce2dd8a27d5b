"""What ranks tell each other when one is out of memory: here ranks are objects of one process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

from swapkit._native.lib import interruptions
from swapkit._runtime.control import rank_alarm
from swapkit._runtime.control.board import Board, parse, write
from swapkit._runtime.control.rank_alarm import Failure, RankAlarm, RankWatch
from swapkit.errors import InvalidDocument, RankOutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

distributed: Any = torch.distributed
ELSEWHERE = 12345  # a thread that does not exist, so that nobody raises what it should


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """End no collectives; return which threads would have."""
    threads: list[str] = []
    monkeypatch.setattr(
        rank_alarm, "end_collectives", lambda: threads.append(threading.current_thread().name)
    )
    monkeypatch.setattr(rank_alarm, "NEWS_SECONDS", 60.0)
    monkeypatch.setattr(rank_alarm, "_known", set())
    yield threads
    interruptions.clear()


def make_ranks(store: Any, count: int = 2) -> list[RankAlarm]:
    return [RankAlarm(Board(lambda: store, rank=rank, count=count)) for rank in range(count)]


def test_ranks_when_one_fails_then_all_know_and_only_the_others_raise(ended: list[str]) -> None:
    ranks = make_ranks(distributed.HashStore(), 3)
    for number, each in enumerate(ranks):
        each.join(ELSEWHERE + number)
    ranks[1].announce(1 << 20, "too much")
    ranks[1].announce(1 << 20, "again")
    for each in ranks:
        failure = each.await_end()
        assert failure is not None
        assert (failure.rank, failure.budget_bytes, failure.text) == (1, 1 << 20, "too much")
        assert f"this is rank {each.rank}" in str(failure)
    assert {thread for thread, _ in interruptions} == {ELSEWHERE, ELSEWHERE + 2}
    assert ended == ["swapkit-alarm"] * 3
    for number, each in enumerate(ranks):
        each.leave(ELSEWHERE + number)
    assert interruptions == []  # code after the session must not raise it


@pytest.mark.parametrize(
    "text",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:20163",
        "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 30000 ms",  # DETAIL's, on rank 0
    ],
)
def test_error_of_a_broken_collective_when_it_comes_before_the_news_then_it_waits_for_them(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, failed = make_ranks(distributed.HashStore())

    def hear() -> RankOutOfMemory | None:
        failed.announce(1 << 20, "too much")
        return RankAlarm.await_end(waiting)

    monkeypatch.setattr(waiting, "await_end", hear)
    monkeypatch.setattr(rank_alarm, "find_alarm", lambda: waiting)
    installation: Any = SimpleNamespace(failures=[])
    watch = RankWatch(installation, 1 << 20)
    try:
        assert watch.find_cause(RuntimeError("a mistake of the program")) is None
        cause = watch.find_cause(RuntimeError(text))
        assert cause is not None
        assert cause.rank == 1
    finally:
        watch.end()


def test_rank_when_it_joins_late_then_it_hears_what_was_said_before() -> None:
    first, late = make_ranks(distributed.HashStore())
    first.join(ELSEWHERE)
    first.announce(1, "")
    first.await_end()
    late.join(ELSEWHERE)
    assert late.await_end() is not None
    late.join(ELSEWHERE + 1)  # a second session
    assert {thread for thread, _ in interruptions} == {ELSEWHERE, ELSEWHERE + 1}


def test_rank_when_the_store_outlives_a_process_group_then_its_failure_is_not_one_of_the_next() -> (
    None
):
    store = distributed.HashStore()
    for text in "first group", "second group":
        rank, other = make_ranks(store)
        rank.join(ELSEWHERE)
        other.announce(1, text)
        failure = rank.await_end()
        assert failure is not None
        assert failure.text == text
        rank.leave(ELSEWHERE)


def test_rank_when_the_store_does_not_answer_then_nothing_waits_for_it() -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def find_store() -> Any:
        asked.set()
        goes_on.wait()
        raise ValueError("gone")

    rank = RankAlarm(Board(find_store, rank=0, count=2))
    rank.join(ELSEWHERE)
    rank.announce(1, "too much")
    assert asked.wait(60)
    rank.leave(ELSEWHERE)
    goes_on.set()


def test_rank_when_no_session_is_left_then_its_thread_ends() -> None:
    (rank,) = make_ranks(distributed.HashStore(), 1)
    before = set(threading.enumerate())
    rank.join(ELSEWHERE)
    (thread,) = set(threading.enumerate()) - before
    rank.leave(ELSEWHERE)
    thread.join(60)
    assert not thread.is_alive()


def test_ranks_when_two_fail_then_all_know_the_first_and_the_next_group_neither() -> None:
    store = distributed.HashStore()
    ranks = make_ranks(store)
    for each in ranks:
        each.announce(1, str(each.rank))
    for each in ranks:
        each.join(ELSEWHERE + each.rank)
    found = [each.await_end() for each in ranks]
    assert [each.rank for each in found if each is not None] in ([0, 0], [1, 1])
    for each in ranks:
        each.leave(ELSEWHERE + each.rank)
    assert not store.check(["swapkit/out-of-memory/2"])


FAILURE = Failure(mark="m", rank=3, budget_bytes=1 << 20, text="too much")


def test_failure_when_parsed_then_it_is_what_was_written() -> None:
    assert parse(write(FAILURE).encode(), Failure) == FAILURE
    error = FAILURE.as_error(0)
    assert isinstance(error, RankOutOfMemory)
    assert str(error).startswith("rank 3 ran out of memory within its budget of 1.00 MiB, ")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'["m", -1, 1, ""]',
        b'["m", true, 1, ""]',
        b'["m", 1, 1e400, ""]',
        b'["m", 1, 1]',
    ],
)
def test_failure_when_it_is_malformed_then_warned_and_the_rank_no_longer_listens(
    text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidDocument, match="Use the same version on all ranks"):
        parse(text, Failure)
    store = distributed.HashStore()
    store.set("swapkit/out-of-memory/1", text)
    rank = make_ranks(store)[0]
    rank._listen(rank._stop)
    assert rank.failure is None
    assert "rank 0 no longer listens to the others: a rank published " in caplog.text
