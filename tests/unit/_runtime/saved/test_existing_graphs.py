"""Graphs that were recorded before a session can be moved, or else are left in peace."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.testing._internal.two_tensor import TwoTensor

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved import existing_graphs as adoption
from swapkit._runtime.torch_compat.thread_stacks import others_wait, stacks
from tests.support import MIB
from tests.support.threads import alongside, on_thread
from tests.unit._runtime.rig import EVERYTHING, in_use, make_swapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation", "idle_threads")


@pytest.fixture
def idle_threads(installation: object) -> None:  # noqa: ARG001 - loads the shim
    """Wait for threads that an earlier test left at work: no graph would be taken in beside."""
    deadline = time.monotonic() + 10
    while not others_wait() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert others_wait(), [
        [(code.co_filename, code.co_name) for code, _ in each] for each in stacks()
    ]


ROOMY = 1 << 40
SIDE = 512


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


def take_in(swapper: Swapper) -> int:
    return swapper._adopt(swapper.evictor.min_bytes)


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
    assert take_in(swapper) >= 1
    assert swapper.mover.resident_count == 1
    assert take_in(swapper) == 0
    assert loss.requires_grad


@pytest.mark.promise("A3")
def test_view_when_its_base_was_changed_then_a_rescue_leaves_the_order_of_backward() -> None:
    leaf = torch.rand(SIDE, SIDE, requires_grad=True)
    hidden = leaf * 1
    view = hidden.t()
    with torch.no_grad():
        hidden.add_(0.125)  # gives the view another node, as soon as anybody asks for its node
    swapper = make_swapper()
    assert take_in(swapper) == 0
    later = hidden * 2
    assert later.grad_fn is not None
    assert view.grad_fn is not None
    assert view.grad_fn._sequence_nr() > later.grad_fn._sequence_nr()


def test_view_when_its_base_was_changed_then_the_graph_of_the_base_moves() -> None:
    x = torch.rand(SIDE, SIDE, requires_grad=True)
    view = x.exp().clone().t()
    base = view._base
    assert base is not None
    with torch.no_grad():
        base.add_(1)
    del base
    assert take_in(make_swapper()) == 1
    view.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


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


def in_two() -> tuple[torch.Tensor, torch.Tensor]:
    x = TwoTensor(torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)).requires_grad_()
    return x, (x * x).tanh().sum()


def without_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    with FakeTensorMode():
        x = torch.ones(SIDE, SIDE, requires_grad=True)
        return x, (x * x).tanh().sum()


def without_sizes() -> tuple[torch.Tensor, torch.Tensor]:
    sizes: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(SIDE, SIDE, requires_grad=True), symbolic_context=sizes)
    return x, (x * x).tanh().sum()


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    parts = [torch.ones(SIDE, SIDE), torch.ones(SIDE // 2, SIDE)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    return x, (x * x).sin().values().sum()


@pytest.mark.parametrize("make", [in_two, without_bytes, without_sizes, ragged])
def test_graph_when_of_a_subclass_then_it_stays_as_it_is_and_others_move(
    make: Callable[[], tuple[torch.Tensor, torch.Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    x, loss = make()
    others = make_loss()
    with swapkit.budget(ROOMY) as session:
        for _ in range(2):
            session.rescue(EVERYTHING)
        assert session.stats.swapped_out_bytes == MIB
        loss.backward()
    del others
    expected, plain = make()
    plain.backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert type(x.grad) is type(expected.grad)
    if make is in_two or make is ragged:
        assert torch.equal(content(x.grad), content(expected.grad))
    assert all(each.levelno < logging.ERROR for each in caplog.records)


def content(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.a if isinstance(tensor, TwoTensor) else tensor.values()
    return found


def test_graph_when_inside_a_function_transform_then_it_stays_as_it_is() -> None:
    def gradients(inside: Callable[[], object]) -> torch.Tensor:
        def function(row: torch.Tensor) -> torch.Tensor:
            hidden = row.exp()
            inside()
            return hidden.sin().sum()

        rows = torch.linspace(0, 1, SIDE * SIDE).view(SIDE, SIDE)
        found: torch.Tensor = torch.func.vmap(torch.func.grad(function))(rows)
        return found

    expected = gradients(lambda: None)
    with swapkit.budget(ROOMY) as session:
        found = gradients(lambda: [session.rescue(EVERYTHING) for _ in range(2)])
    assert torch.equal(found, expected)


def test_graph_when_another_thread_runs_it_back_then_none_is_touched() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(_grad: torch.Tensor) -> None:
        inside.set()
        go_on.wait()

    x, loss = make_loss()
    x.register_hook(wait)
    with alongside(loss.backward):
        inside.wait()
        assert take_in(make_swapper()) == 0
        go_on.set()
    _y, other = make_loss()
    assert take_in(make_swapper()) > 0
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


def test_custom_function_when_it_shows_what_it_saved_only_once_then_it_stays_as_it_is() -> None:
    class Once(torch.autograd.Function):
        clear_saved_tensors_on_access = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            made: torch.Tensor = grads[0] * x.exp()
            return made

    x = torch.linspace(0, 1, MIB // 4, requires_grad=True)
    loss = Once.apply(x * 1).sum()
    with swapkit.budget(ROOMY) as session:
        for _ in range(2):
            session.rescue(EVERYTHING)
        loss.backward()
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]


def test_graph_when_a_handler_that_removes_itself_raises_meanwhile_then_it_reaches_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(Exception):
        pass

    def stop_once(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Stopped

    x, loss = make_loss()
    tracker = get_runtime().tracker
    find_site = tracker.site
    former = signal.signal(signal.SIGUSR1, stop_once)

    def interrupted() -> tuple[int, int]:
        signal.raise_signal(signal.SIGUSR1)
        return find_site()

    def take_in_and_train() -> None:
        with swapkit.budget(ROOMY) as session:
            with monkeypatch.context() as patched:
                patched.setattr(tracker, "site", interrupted)
                session.rescue(EVERYTHING)
            loss.backward()

    try:
        with pytest.raises(Stopped):
            take_in_and_train()
    finally:
        signal.signal(signal.SIGUSR1, former)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


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
