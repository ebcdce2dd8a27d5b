"""The life of a session: entered only once, undone whatever happens, with figures of its own."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.saved.device import CPU, Limits
from swapkit._runtime.session.session import Session
from swapkit.errors import OverBudget, SessionError
from tests.support import MIB, idle, limit_above_reserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation

ROOMY = 1 << 40


def make_session(
    limit_bytes: int = ROOMY,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    host_limit_bytes: int | None = None,
) -> Session:
    limits = Limits(budget_bytes=limit_bytes, host_bytes=host_limit_bytes)
    config = SessionConfig(device=CPU, limits=limits, min_swap_bytes=1024)
    return Session(config, model, () if optimizer is None else (optimizer,))


def make_loss(nbytes: int = MIB) -> torch.Tensor:
    """Return a loss whose graph alone holds one storage of `nbytes`."""
    x = torch.ones(nbytes // 4, requires_grad=True)
    return (x * 1.0).exp().sum()


def assert_idle(installation: Installation) -> None:
    idle.assert_idle(installation)
    saved = make_loss().grad_fn.next_functions[0][0]._saved_result  # type: ignore[union-attr]
    assert saved.numel() == MIB // 4


@pytest.mark.usefixtures("installation")
def test_session_when_not_entered_then_it_has_nothing_to_tell() -> None:
    session = make_session()
    for ask in (lambda: session.stats, session.explain, session.mark_step):
        with pytest.raises(SessionError, match=r"use `with swapkit\.budget"):
            ask()


@pytest.mark.usefixtures("installation")
def test_session_when_entered_again_then_refused() -> None:
    session = make_session()
    with session, pytest.raises(SessionError, match="entered only once"):
        session.__enter__()
    with pytest.raises(SessionError, match="entered only once"):
        session.__enter__()


def test_session_when_it_ends_then_everything_is_undone(installation: Installation) -> None:
    with make_session():
        assert installation.pool.budget_bytes == ROOMY
    assert_idle(installation)


def test_session_when_the_block_raises_then_everything_is_undone(
    installation: Installation,
) -> None:
    with pytest.raises(KeyError), make_session():
        raise KeyError("inside")
    assert_idle(installation)


def test_session_when_the_limit_is_too_low_then_entry_fails_and_may_be_tried_again(
    installation: Installation,
) -> None:
    held = torch.ones(4 * MIB)
    session = make_session(limit_above_reserved(installation, -4 * MIB))
    with pytest.raises(OverBudget):
        session.__enter__()
    assert_idle(installation)
    del held
    with session:
        assert session.stats.budget_bytes == session.limit_bytes


@pytest.mark.usefixtures("installation")
def test_steps_when_the_optimizer_is_known_then_each_step_counts() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_session(model=model, optimizer=optimizer) as session:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        session.mark_step()
        assert session.stats.steps == 4
    optimizer.step()
    assert session.stats.steps == 4


@pytest.mark.usefixtures("installation")
def test_stats_when_the_session_ended_then_they_stay() -> None:
    with make_session() as session:
        loss = make_loss()
        assert session.rescue(1) == MIB
        loss.backward()
        inside = session.stats
    torch.ones(64 * MIB)
    assert dataclasses.replace(session.stats, stall_seconds=0.0) == dataclasses.replace(
        inside, stall_seconds=0.0
    )
    assert inside.swapped_out_bytes == inside.swapped_in_bytes == MIB
    assert inside.oom_rescues == 1
    assert inside.host_peak_bytes >= MIB
    assert session.stage == "stable"


@pytest.mark.promise("C6")
def test_peak_when_the_budget_is_tight_then_at_most_the_budget(installation: Installation) -> None:
    limit_bytes = limit_above_reserved(installation, 24 * MIB)
    with make_session(limit_bytes) as session:
        x = torch.ones(MIB, requires_grad=True)
        losses = [(x * 1.0).exp().sum().view(1) for _ in range(6)]
        torch.cat(losses).sum().backward()
    assert session.stats.oom_rescues > 0
    assert 20 * MIB < session.stats.peak_bytes <= limit_bytes
    assert session.stats.budget_bytes == limit_bytes


def test_peak_when_sessions_nest_then_each_has_its_own(installation: Installation) -> None:
    base_bytes = limit_above_reserved(installation, 0)
    with make_session() as outer:
        torch.ones(MIB)  # 4 MiB, given back at once
        with make_session() as inner:
            torch.ones(4 * MIB)
            assert inner.stats.steps == 0
            inner.mark_step()
        installation.pool.trim()
        torch.ones(2 * MIB)
    assert inner.stats.steps == 1
    assert outer.stats.steps == 0
    assert inner.stats.peak_bytes >= base_bytes + 16 * MIB
    assert outer.stats.peak_bytes >= inner.stats.peak_bytes


def test_peak_when_memory_was_used_before_then_it_does_not_count(
    installation: Installation,
) -> None:
    torch.ones(64 * MIB)
    base_bytes = limit_above_reserved(installation, 0)
    with make_session() as session:
        torch.ones(MIB)
    assert base_bytes <= session.stats.peak_bytes < base_bytes + 16 * MIB


@pytest.mark.usefixtures("installation")
def test_host_memory_when_the_block_ends_then_what_is_cached_is_given_back() -> None:
    session = make_session()
    with session:
        loss = make_loss(8 * MIB)
        assert session.rescue(1) == 8 * MIB
        assert session._active is not None
        scheduler = session._active.swapper.scheduler
        loss.backward()
        del loss
        assert scheduler.stats().host_bytes == 0
        assert scheduler.stats().host_reserved_bytes >= 8 * MIB
    assert scheduler.stats().host_reserved_bytes == 0
    assert session.stats.host_peak_bytes >= 8 * MIB


@pytest.mark.usefixtures("installation")
def test_host_memory_when_block_and_graph_are_gone_then_the_pool_of_copies_goes() -> None:
    session = make_session()
    with session:
        loss = make_loss(8 * MIB)
        assert session.rescue(1) == 8 * MIB
        assert session._active is not None
        scheduler = weakref.ref(session._active.swapper.scheduler)
    assert scheduler() is not None
    loss.backward()
    del loss
    gc.collect()
    assert scheduler() is None
    assert session.stats.swapped_out_bytes == 8 * MIB


@pytest.mark.promise("A3")
@pytest.mark.usefixtures("installation")
def test_graph_when_it_outlives_its_session_then_backward_still_works() -> None:
    x = torch.linspace(0, 1, MIB // 4, requires_grad=True)
    with make_session() as session:
        loss = (x * 1.0).exp().sum()
        assert session.rescue(1) == MIB
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_explain_when_asked_then_figures_and_outside_tensors(installation: Installation) -> None:
    swapkit.uninstall()
    early = nn.Parameter(torch.ones(MIB))
    swapkit.install()
    limit_bytes = limit_above_reserved(installation, 64 * MIB)
    with make_session(limit_bytes) as session:
        loss = make_loss()
        session.rescue(1)
        session.mark_step()
    lines = session.explain().splitlines()
    assert lines[0].endswith("reserved, after 1 steps")
    assert lines[1].startswith(
        "policy rescue: 1 rescues (allocations that did not fit at first), 1.00 MiB copied out,"
    )
    assert lines[3].startswith("outside the budget (allocated before swapkit was installed")
    assert any("parameters (" in line for line in lines[4:])
    assert early.requires_grad
    assert loss.requires_grad


@pytest.mark.usefixtures("installation")
def test_hints_when_the_host_is_full_then_its_limit_is_named() -> None:
    with make_session(host_limit_bytes=MIB) as session:
        x = torch.ones(2 * MIB // 4, requires_grad=True)
        loss = (x * 1.0).exp_().sum()  # what is changed in place is not computed again
        assert session.rescue(1) == 0
        hints = session.hints(session.limit_bytes + 1)
        del loss
        without = session.hints(1)
    assert hints[0] == (
        "the host has no room for more copies than 1.00 MiB: raise host_limit, e.g. to 3MiB"
    )
    assert hints[1].startswith("a budget of at least ")
    assert not any("of saved tensors" in hint for hint in hints)  # a fact, nothing to try
    assert without[-1].startswith("swapkit estimate")


@pytest.mark.parametrize("copied_by", [pickle.dumps, copy.deepcopy])
def test_session_when_it_is_copied_then_refused_with_what_to_save(
    installation: Installation, copied_by: Callable[[object], object]
) -> None:
    session = make_session()
    with pytest.raises(TypeError, match=r"session\.save_plan\(path\)"):
        copied_by(session)
    with session, pytest.raises(TypeError, match=r"cannot be pickled or copied"):
        copied_by({"model": nn.Linear(1, 1), "session": session})
    assert_idle(installation)
