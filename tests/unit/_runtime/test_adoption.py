"""Graphs that were recorded before a session can be moved, or else are left in peace."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime import adoption
from swapkit._runtime.adoption import adopt_graphs
from tests.support import MIB
from tests.support.threads import alongside, on_thread
from tests.unit._runtime.rig import EVERYTHING, in_use, make_swapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.installation import Installation

pytestmark = pytest.mark.usefixtures("installation")

ROOMY = 1 << 40


def make_loss(nbytes: int = MIB) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0, 1, nbytes // 4, requires_grad=True)
    return x, (x * 1.0).exp().sum()


@pytest.mark.promise("A3")
def test_graph_when_recorded_before_the_session_then_it_moves_and_comes_back(
    installation: Installation,
) -> None:
    x, loss = make_loss()
    with swapkit.budget(ROOMY) as session:
        before = in_use(installation)
        assert session.rescue(EVERYTHING) == MIB
        assert installation.pool.in_use_bytes() == before - MIB
        assert session.stats.swapped_out_bytes == MIB
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_graph_when_recorded_on_a_thread_without_the_session_then_it_moves() -> None:
    with swapkit.budget(ROOMY) as session:
        x, loss = on_thread(make_loss)
        assert session.rescue(EVERYTHING) == MIB
        loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_graph_when_taken_in_already_then_not_again() -> None:
    _x, loss = make_loss()
    swapper = make_swapper()
    assert adopt_graphs(swapper) >= 1
    assert swapper.mover.resident_count == 1
    assert adopt_graphs(swapper) == 0
    assert loss.requires_grad


def hooked() -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return make_loss()[1]


def freed() -> torch.Tensor:
    loss = make_loss()[1]
    loss.backward()
    return loss


def changed() -> torch.Tensor:
    x = torch.ones(1024, requires_grad=True)
    hidden = (x * 1).exp()
    loss = hidden.sum()
    hidden.detach().add_(1)
    return loss


def empty() -> torch.Tensor:
    """A node that saved nothing for one of its inputs."""
    return torch.nn.functional.batch_norm(
        torch.ones(4, 4, requires_grad=True) * 1, None, None, training=True
    ).sum()


@pytest.mark.parametrize("make", [hooked, freed, changed, empty])
def test_graph_when_it_cannot_be_taken_in_then_it_stays_as_it_is(
    make: Callable[[], torch.Tensor],
) -> None:
    loss = make()
    with swapkit.budget(ROOMY) as session:
        session.rescue(EVERYTHING)
        if make is hooked or make is empty:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"modified by an inplace|second time"):
                loss.backward()


def test_graph_when_another_thread_runs_it_back_then_none_is_touched() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(_grad: torch.Tensor) -> None:
        inside.set()
        go_on.wait()

    x, loss = make_loss()
    x.register_hook(wait)
    with alongside(loss.backward):
        inside.wait()
        assert adopt_graphs(make_swapper()) == 0
        go_on.set()
    _y, other = make_loss()
    assert adopt_graphs(make_swapper()) > 0
    assert other.requires_grad


def test_custom_function_when_it_saved_before_then_its_tensors_move() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.exp(), x.sin())
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            first, second = ctx.saved_tensors
            found: torch.Tensor = grads[0] * first * second
            return found

    x = torch.linspace(0, 1, MIB // 4, requires_grad=True)
    loss = Twice.apply(x).sum()
    with swapkit.budget(ROOMY) as session:
        assert session.rescue(EVERYTHING) == 2 * MIB
        loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp() * x.detach().sin())


@pytest.mark.usefixtures("no_collector")
def test_search_when_done_then_it_leaves_no_cycle_behind() -> None:
    assert adoption._is_alone()
    assert gc.collect() == 0


@pytest.mark.promise("A14")
def test_graph_when_its_tensors_are_below_the_sessions_least_size_then_they_stay() -> None:
    _x, loss = make_loss()
    with swapkit.budget(ROOMY, min_swap_bytes="2MiB") as session:
        assert session.rescue(EVERYTHING) == 0
    assert loss.requires_grad
