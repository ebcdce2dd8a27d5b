"""A change that ranks make together: here they are objects of one process, with one store."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import Any

import pytest
import torch.distributed

from swapkit._runtime.control import board
from swapkit._runtime.control.board import Board, parse, write
from swapkit._runtime.control.rank_switch import (
    COMPARED,
    LEADS,
    Proposal,
    RankSwitch,
    WeightSetting,
)
from swapkit.errors import InvalidDocument, SessionError

distributed: Any = torch.distributed
STEP = 12  # collectives of each step
KEPT, REASON = ("this",), "because"
SETTINGS = (WeightSetting("this", frees=True), WeightSetting("that", frees=False))
ENOUGH = sum(LEADS) + 3 * COMPARED


class Rank:
    """A rank that runs steps; `changed`: where it made the change."""

    def __init__(
        self,
        store: Any,
        rank: int,
        count: int = 2,
        *,
        settings: tuple[WeightSetting, ...] = SETTINGS,
        begins: int = 0,
    ) -> None:
        self.store = store
        self.positions = list[int]()
        self.position = begins
        board = Board(self.find_store, rank=rank, count=count)
        ranks = tuple(range(count))
        self.switch = RankSwitch(board, "swapkit/test", ranks, self.positions, settings)
        self.changed: int | None = None
        self.is_mute = False
        if self.switch.proposes:
            self.switch.propose(KEPT, REASON)

    def find_store(self) -> Any:
        if self.is_mute:
            raise RuntimeError("no answer")
        return self.store

    def step(self, collectives: int = STEP) -> None:
        self.position += collectives
        self.positions.append(self.position)
        proposal = self.switch.end_step()
        if proposal is not None:
            assert (proposal.kept, proposal.reason) == (KEPT, REASON)
            assert self.changed is None
            self.changed = self.position


def make(count: int = 2, **options: Any) -> list[Rank]:
    store = distributed.HashStore()
    return [Rank(store, rank, count, **options) for rank in range(count)]


def run(ranks: list[Rank], steps: int) -> None:
    for _ in range(steps):
        for rank in ranks:
            rank.step()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_ranks_when_they_run_in_step_then_all_change_at_one_position(
    count: int, *, is_reversed: bool
) -> None:
    ranks = make(count)
    run(ranks[::-1] if is_reversed else ranks, LEADS[0] + COMPARED + 1)
    (where,) = {rank.changed for rank in ranks}
    assert where == (LEADS[0] + COMPARED) * STEP
    assert all(rank.switch.is_over and not rank.switch.why for rank in ranks)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_when_they_run_ahead_of_each_other_then_all_change_at_one_position_or_none(
    seed: int,
) -> None:
    draw = random.Random(seed)
    ranks = make(3)
    most_ahead = draw.choice([1, 3, 6, 20])
    while min(len(rank.positions) for rank in ranks) < 2 * ENOUGH:
        rank = draw.choice(ranks)
        behind = min(len(each.positions) for each in ranks)
        if len(rank.positions) - behind < most_ahead:
            rank.step()
    where = {rank.changed for rank in ranks}
    assert len(where) == 1
    assert all(rank.switch.is_over for rank in ranks)
    if most_ahead < LEADS[0]:
        assert where != {None}
    for rank in ranks:
        assert bool(rank.switch.why) == (rank.changed is None)


def test_ranks_when_one_hears_too_late_then_a_later_position_is_proposed() -> None:
    first, second = make()
    for _ in range(COMPARED + LEADS[0]):
        first.step()
    assert first.changed is None
    run([second], COMPARED + LEADS[0])
    assert second.changed is None
    run([first, second], LEADS[1] + 2)
    assert first.changed == second.changed
    assert first.changed is not None


def test_ranks_when_one_never_comes_then_the_other_gives_up_and_says_why() -> None:
    first, _ = make()
    run([first], ENOUGH)
    assert first.changed is None
    assert first.switch.why == "rank 1 had not heard of a change in time"


def test_ranks_when_their_steps_end_elsewhere_then_none_changes() -> None:
    store = distributed.HashStore()
    first, second = Rank(store, 0), Rank(store, 1, begins=5)
    run([first, second], ENOUGH)
    assert (first.changed, second.changed) == (None, None)
    for rank in first, second:
        assert rank.switch.why.startswith("the steps of rank 1 do not end at the same collectives")


def test_ranks_when_a_backend_does_not_count_then_none_changes() -> None:
    ranks = make()
    for _, rank in itertools.product(range(ENOUGH), ranks):
        rank.step(0)
    assert [rank.changed for rank in ranks] == [None, None]
    assert "do not end at the same collectives" in ranks[1].switch.why


def test_ranks_when_one_has_other_settings_then_none_changes() -> None:
    store = distributed.HashStore()
    ranks = [Rank(store, rank, 3, settings=SETTINGS[rank == 1 :]) for rank in range(3)]
    run(ranks, ENOUGH)
    for rank in ranks:
        assert rank.changed is None
        assert rank.switch.why == "the modules of the ranks have other settings"


def test_ranks_when_the_first_one_wants_nothing_then_all_stop_asking() -> None:
    ranks = make()
    ranks[0].switch.propose(None, "nothing is better")
    run(ranks, 2)
    for rank in ranks:
        assert rank.switch.is_over
        assert rank.switch.why == "nothing is better"


@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("steps", [1, COMPARED, COMPARED + 2])
def test_ranks_when_one_leaves_before_the_position_then_none_changes(
    leaving: int, steps: int
) -> None:
    ranks = make()
    run(ranks, steps)
    ranks[leaving].switch.leave()
    ranks[leaving].switch.leave()
    other = ranks[1 - leaving]
    run([other], ENOUGH)
    assert other.changed is None
    assert other.switch.is_over


def test_leave_when_the_others_have_changed_already_then_it_raises() -> None:
    first, second = make()
    run([first, second], COMPARED + LEADS[0] - 1)
    first.step()
    assert first.changed is not None
    with pytest.raises(SessionError, match="End it at the same step on all ranks"):
        second.switch.leave()
    second.switch.leave()


def test_step_when_it_ends_elsewhere_after_consent_then_it_raises_rather_than_hangs() -> None:
    first, second = make()
    run([first, second], COMPARED + LEADS[0] - 1)
    first.step()
    with pytest.raises(SessionError, match="no longer end at the same collectives"):
        second.step(STEP + 1)


def test_step_when_the_store_is_silent_after_consent_then_it_raises_rather_than_guesses() -> None:
    first, second = make()
    run([first, second], COMPARED + LEADS[0] - 1)
    second.is_mute = True
    with pytest.raises(SessionError, match="cannot ask whether all ranks change"):
        second.step()


def test_step_when_the_store_is_silent_before_consent_then_training_goes_on() -> None:
    first, second = make()
    second.is_mute = True
    run([first, second], ENOUGH)
    assert (first.changed, second.changed) == (None, None)
    assert "cannot be asked: no answer" in second.switch.why


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"{}", b"[" * 100_000, b"9" * 5000, b"\xff", b"\xed\xb2\x80"),
        *(b'[["k"], "", [], 1]', b'[["k"], "", [], "x", [1]]', b'[["k"], "", [], true, [1]]'),
        *(b'[5, "", [], 1, [1]]', b'[["k"], "", [], 1e999, [1]]', b'[["k"], "", [], 1, [-1]]'),
        *(b'[["k"], "", [], 1, []]', b'[[[]], "", [], 1, [1]]', b'[["k"], "", ["s"], 1, [1]]'),
    ],
)
def test_proposal_when_malformed_then_it_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidDocument, match="cannot read"):
        parse(text, Proposal)


def test_rank_when_a_proposal_is_malformed_then_it_goes_on_without_and_says_why() -> None:
    _, second = make()
    second.store.set("swapkit/test/0/proposal", "[" * 100_000)
    run([second], ENOUGH)
    assert second.changed is None
    assert "the ranks' store cannot be asked: a rank published b'[[" in second.switch.why


def test_proposal_when_written_and_read_then_it_is_the_same() -> None:
    proposal = Proposal(kept=KEPT, reason=REASON, settings=SETTINGS, at=7, positions=(1, 2, 3))
    assert parse(write(proposal).encode(), Proposal) == proposal


class Stalling:
    """A store that once takes long to store what a rank says, once it has begun to."""

    def __init__(self, store: Any, rank: int, seconds: float) -> None:
        self.store = store
        self._key = f"rank-{rank}"
        self._seconds = seconds

    def set(self, key: str, value: str) -> None:
        seconds, self._seconds = (self._seconds, 0.0) if key.endswith(self._key) else (0.0, 0.0)
        time.sleep(seconds)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_when_its_consent_arrives_after_it_gave_up_waiting_then_it_raises(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "ANSWER_SECONDS", 0.1)
    ranks = make()
    ranks[late].store = Stalling(ranks[late].store, late, 0.5)
    with pytest.raises(SessionError, match="cannot ask whether all ranks change"):
        run(ranks, ENOUGH)
    assert ranks[late].switch.is_over
    assert ranks[late].changed is None


def test_rank_when_it_gave_up_waiting_then_a_late_request_does_not_consent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "ANSWER_SECONDS", 0.1)
    goes_on = threading.Event()
    ranks = make()
    store = ranks[1].store

    class Held:
        def check(self, keys: list[str]) -> bool:
            assert goes_on.wait(20)
            return bool(store.check(keys))

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    for _ in range(COMPARED):
        ranks[0].step()  # proposes
    ranks[1].store = Held()
    for _ in range(COMPARED):
        ranks[1].step()
        if ranks[1].switch.is_over:
            break
    assert ranks[1].switch.is_over
    goes_on.set()
    time.sleep(0.2)
    for _ in range(ENOUGH):
        ranks[0].step()
    assert ranks[0].changed is None


def test_rank_when_it_has_consented_and_leaves_without_an_answer_then_it_raises() -> None:
    ranks = make()
    run(ranks, COMPARED + 1)
    assert ranks[1].switch._consented is not None
    ranks[1].is_mute = True
    with pytest.raises(SessionError, match="cannot ask whether all ranks change"):
        ranks[1].switch.leave()
    ranks[1].switch.leave()  # nothing is left to do
