"""`session.history` and `on_step`."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit._runtime.session import history
from swapkit.errors import InvalidArgument
from tests.support.gelu_layers import make, train

if TYPE_CHECKING:
    from swapkit._runtime.session.session import Session


def test_history_when_a_session_trains_then_its_sums_are_the_statistics() -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer) as session:
        train(model, optimizer, 8)
        records = session.history
        stats = session.stats
    assert [each.step for each in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert stats.swapped_out_bytes > 0
    assert sum(each.swapped_out_bytes for each in records) == stats.swapped_out_bytes
    assert sum(each.rescues for each in records) == stats.oom_rescues > 0
    assert max(each.peak_bytes for each in records) == stats.peak_bytes
    assert all(0 < each.peak_bytes <= stats.budget_bytes for each in records)
    assert all(each.seconds > 0 for each in records)
    assert records[0].stage == "warmup"
    assert session.history == records


def test_history_when_a_step_is_smaller_then_its_peak_is_its_own() -> None:
    swapkit.install(device="cpu")
    gc.collect()
    require_installation().pool.trim()
    others_bytes = swapkit.memory_stats()["reserved_bytes.all.current"]
    with swapkit.budget("64MiB", policy="rescue") as session:
        held = torch.ones(4 << 20)
        session.mark_step()
        del held
        require_installation().pool.trim()  # what is cached stays reserved
        session.mark_step()
        session.mark_step()
    large, _, last = session.history
    assert large.peak_bytes >= 16 << 20
    assert last.peak_bytes - others_bytes < 1 << 20
    assert {each.stage for each in session.history} == {"stable"}


def test_history_when_many_steps_then_only_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STEPS_KEPT", 3)
    with swapkit.budget("64MiB", policy="rescue") as session:
        for _ in range(5):
            session.mark_step()
    assert [each.step for each in session.history] == [3, 4, 5]
    assert session.stats.steps == 5


def test_history_when_read_while_another_thread_trains_then_it_is_whole() -> None:
    with swapkit.budget("64MiB", policy="rescue") as session:
        read: list[int] = []
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                steps = [each.step for each in session.history]
                assert steps == list(range(1, len(steps) + 1))
                read.append(len(steps))

        reader = threading.Thread(target=look)
        reader.start()
        for _ in range(2000):
            session.mark_step()
        done.set()
        reader.join()
    assert read[-1] <= 2000 == len(session.history)


def test_on_step_when_a_step_ends_then_it_sees_that_step_on_its_thread() -> None:
    model, optimizer = make()
    seen: list[Any] = []

    def look(session: Session) -> None:
        seen.append((session.history[-1].step, session.stats.steps, threading.get_ident()))

    with swapkit.budget("64MiB", model, optimizer, on_step=look):
        train(model, optimizer, 3)
    assert seen == [(step, step, threading.get_ident()) for step in (1, 2, 3)]


def test_on_step_when_it_raises_then_the_step_is_complete_and_training_goes_on() -> None:
    model, optimizer = make()

    def stop(session: Session) -> None:
        if session.stats.steps == 2:
            raise StopIteration("early")

    with swapkit.budget("64MiB", model, optimizer, on_step=stop) as session:
        train(model, optimizer, 1)
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(StopIteration, match="early"):
            train(model, optimizer, 1)
        assert not all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        train(model, optimizer, 1)
    assert [each.step for each in session.history] == [1, 2, 3]


def test_on_step_when_it_closes_the_session_then_it_is_not_called_again() -> None:
    model, optimizer = make()
    calls: list[int] = []

    def close(session: Session) -> None:
        calls.append(session.stats.steps)
        session.close()

    with swapkit.budget("64MiB", model, optimizer, on_step=close) as session:
        train(model, optimizer, 3)
    assert calls == [1]
    assert session.stats.steps == 1


def test_on_step_when_the_session_is_lost_then_nothing_keeps_it() -> None:
    calls: list[int] = []
    session = swapkit.budget("64MiB", policy="rescue", on_step=lambda _: calls.append(1))
    session.__enter__()
    session.mark_step()
    del session
    gc.collect()
    assert swapkit.sessions() == ()
    assert calls == [1]


def test_on_step_when_it_is_no_function_then_the_error_says_so() -> None:
    with pytest.raises(InvalidArgument, match="expected a function that takes the session"):
        swapkit.budget("64MiB", on_step=3)  # type: ignore[arg-type]
