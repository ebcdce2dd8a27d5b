"""Sessions end: in any order, from any thread, and when they are lost."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.model import global_hooks
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit.errors import SessionError
from tests.support import MIB, installed
from tests.support.idle import assert_idle, budget_bytes, has_hooks
from tests.support.sessions import make_training, train_plainly
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

STEPS = 8


@pytest.fixture(autouse=True)
def installation() -> Iterator[Installation]:
    with installed() as installation:
        yield installation
        assert_idle(installation)


# ---- order and threads -------------------------------------------------------------------------


def test_sessions_when_left_in_another_order_then_the_other_holds_on() -> None:
    outer, inner = swapkit.budget("64MiB"), swapkit.budget("32MiB")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert budget_bytes() == 32 * MIB
    assert swapkit.sessions() == (inner,)
    x = torch.ones(MIB, requires_grad=True)
    loss = (x * 1.0).exp().sum()
    assert inner.rescue(1) == 4 * MIB
    inner.__exit__(None, None, None)
    loss.backward()
    assert x.grad is not None


@pytest.mark.parametrize("policy", ["rescue", "auto"])
def test_session_when_closed_on_another_thread_then_training_goes_on_with_the_same_bits(
    policy: str,
) -> None:
    plain = train_plainly(make_training, STEPS)
    training = make_training()
    with swapkit.budget(
        plain.budget(0.6), training.model, training.optimizer, policy=policy
    ) as session:
        for _ in range(STEPS // 2):
            training.step()
        loss = training.forward()
        on_thread(session.close)
        assert budget_bytes() == 0
        assert swapkit.sessions() == ()
        steps = session.stats.steps
        loss.backward()
        training.model.zero_grad()
        for _ in range(STEPS // 2):
            training.step()
    assert training.outcome() == plain.outcome
    assert session.stats.steps == steps == STEPS // 2
    assert "ended" in repr(session)


def test_session_when_closed_while_a_step_is_recorded_then_its_thread_stops_recording() -> None:
    training = make_training()
    with swapkit.budget("1GiB", training.model, training.optimizer, profile_steps=1) as session:
        loss = training.forward()
        assert len(mode_stack()) == 1
        on_thread(session.close)
        loss.backward()
    assert len(mode_stack()) == 0


def test_session_when_closed_elsewhere_then_its_thread_takes_the_rest_back_with_its_step() -> None:
    training = make_training()
    with swapkit.budget("1GiB", training.model, training.optimizer, profile_steps=1) as session:
        loss = training.forward()
        on_thread(session.close)
        loss.backward()
        assert len(mode_stack()) == 1
        assert has_hooks()
        assert training.optimizer is not None
        training.optimizer.step()
        assert len(mode_stack()) == 0
        assert not has_hooks()
        assert global_hooks.steps.now == ()


def test_session_when_left_on_another_thread_then_it_ends_and_leaves_its_own_later() -> None:
    session = swapkit.budget("64MiB").__enter__()
    on_thread(lambda: session.__exit__(None, None, None))
    assert budget_bytes() == 0
    assert has_hooks()  # inert, until this thread meets swapkit again
    saved = torch.ones(MIB, requires_grad=True).exp()
    assert session.rescue(1) == 0
    saved.sum().backward()
    with swapkit.budget("64MiB"):
        pass


def test_session_when_its_thread_is_gone_then_another_ends_it() -> None:
    sessions = []
    training = make_training()

    def enter() -> None:
        sessions.append(swapkit.budget("1GiB", training.model, training.optimizer).__enter__())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert swapkit.sessions() == (sessions[0],)
    sessions[0].close()
    assert "forward" not in vars(training.model)
    assert not training.model._forward_pre_hooks


def test_session_when_a_foreign_pair_is_inside_then_its_own_goes_with_the_next() -> None:
    session = swapkit.budget("64MiB").__enter__()
    with torch.autograd.graph.save_on_cpu():
        session.close()
        x = torch.ones(1024, requires_grad=True)
        x.exp().sum().backward()
    with swapkit.budget("64MiB"):
        assert has_hooks()
    assert x.grad is not None


def test_session_when_closed_inside_backward_then_the_next_one_evicts_again() -> None:
    x = torch.ones(MIB, requires_grad=True)
    with swapkit.budget("64MiB") as session:
        x.register_hook(lambda _: session.close())
        (x * 1.0).exp().sum().backward()
    assert not has_hooks()
    with swapkit.budget("32MiB") as session:
        loss = (x * 1.0).exp().sum()
        assert session.rescue(1) == 4 * MIB
    del loss


def test_session_when_closed_twice_then_nothing_happens_and_the_figures_stay() -> None:
    with swapkit.budget("64MiB") as session:
        session.mark_step()
        session.close()
        session.close()
        with pytest.raises(SessionError, match="not active"):
            session.mark_step()
    assert session.stats.steps == 1
    assert session.stats.budget_bytes == 64 * MIB


def test_close_when_the_session_was_never_entered_then_nothing_happens() -> None:
    session = swapkit.budget("64MiB")
    session.close()
    assert repr(session) == "<swapkit session, budget 64.00 MiB, not entered>"
    with session:
        assert repr(session).startswith("<swapkit session, warmup: recording, peak ")


def test_sessions_when_asked_then_the_active_ones_in_order_of_any_thread() -> None:
    with swapkit.budget("64MiB") as outer, swapkit.budget("32MiB") as inner:
        assert swapkit.sessions() == (outer, inner) == on_thread(swapkit.sessions)
    assert swapkit.sessions() == ()


def test_uninstall_when_forced_then_all_sessions_have_ended(installation: Installation) -> None:
    with swapkit.budget("64MiB") as outer, swapkit.budget("32MiB"):
        with pytest.raises(SessionError, match=r"force=True"):
            swapkit.uninstall()
        on_thread(lambda: swapkit.uninstall(force=True))
        assert not installation.active
        assert budget_bytes_of(installation) == 0
        assert outer.stats.budget_bytes == 64 * MIB
    swapkit.install()


def budget_bytes_of(installation: Installation) -> int:
    return installation.pool.budget_bytes


# ---- lost handles ------------------------------------------------------------------------------


def test_session_when_a_cell_runs_again_then_only_the_last_one_limits() -> None:
    plain = train_plainly(make_training, 3 * STEPS)
    training = make_training()
    for share in (0.5, 0.8, 0.7):  # the same variable each time, as in a notebook
        session = swapkit.budget(
            plain.budget(share), training.model, training.optimizer
        ).__enter__()
        assert budget_bytes() == plain.budget(share)
        assert swapkit.sessions() == (session,)
        for _ in range(STEPS):
            training.step()
        assert session.stats.steps == STEPS
        assert session.stats.peak_bytes <= session.stats.budget_bytes
    session.close()
    assert training.outcome() == plain.outcome


def test_session_when_its_handle_is_dropped_at_once_then_it_ends_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swapkit.budget("64MiB").__enter__()
    assert budget_bytes() == 0
    assert "its handle was deleted" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_session_when_lost_in_a_cycle_then_the_collector_ends_it() -> None:
    holder: list[Any] = [swapkit.budget("64MiB").__enter__()]
    holder.append(holder)
    del holder
    gc.collect()
    assert budget_bytes() == 0


def test_session_when_lost_where_a_lock_is_held_then_it_ends_with_the_next_step(
    installation: Installation,
) -> None:
    with swapkit.budget("96MiB") as outer:
        lost = [swapkit.budget("64MiB").__enter__()]
        with installation.lock:
            lost.clear()
            assert budget_bytes() == 64 * MIB
        outer.mark_step()
        assert budget_bytes() == 96 * MIB


def test_session_when_its_generator_is_lost_on_another_thread_then_it_ends() -> None:
    def batches() -> Iterator[int]:
        with swapkit.budget("64MiB"):
            yield from range(4)

    running = [batches()]
    assert next(running[0]) == 0
    assert budget_bytes() == 64 * MIB
    on_thread(running.clear)
    assert budget_bytes() == 0


def test_session_when_its_entry_is_interrupted_then_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = make_training()
    session = swapkit.budget("64MiB", training.model, training.optimizer)

    def interrupted(_session: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            "swapkit._runtime.session.session._list", interrupted
        )  # the last that it does
        with pytest.raises(KeyboardInterrupt):
            session.__enter__()
    assert budget_bytes() == 0
    assert not training.model._forward_pre_hooks
    with session:
        assert swapkit.sessions() == (session,)


# ---- figures -----------------------------------------------------------------------------------


def test_metrics_when_asked_then_flat_numbers_under_the_prefix() -> None:
    with swapkit.budget("64MiB", policy="rescue") as session:
        session.mark_step()
        metrics = session.metrics()
    assert metrics["swapkit/steps"] == 1
    assert metrics["swapkit/budget_bytes"] == 64 * MIB
    assert metrics["swapkit/stage"] == 2
    assert "swapkit/step_seconds" not in metrics  # not known under "rescue" or so soon
    assert all(type(value) in {int, float} for value in metrics.values())
    assert session.metrics(prefix="")["peak_bytes"] == session.stats.peak_bytes


@pytest.mark.parametrize("policy", ["auto", "recompute", "rescue"])
@pytest.mark.parametrize("steps", [0, 1, STEPS])
def test_close_when_on_another_thread_then_model_and_optimizer_can_go(
    policy: str, steps: int
) -> None:
    training = make_training()
    session = swapkit.budget("1GiB", training.model, training.optimizer, policy=policy)
    session.__enter__()
    for _ in range(steps):
        training.step()
    training.forward()  # while it is recorded, after one step
    on_thread(session.close)
    held = [weakref.ref(each) for each in (training.model, training.optimizer)]
    del training
    gc.collect()
    assert [each() for each in held] == [None, None]
