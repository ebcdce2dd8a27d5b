"""What autograd keeps is checked, freed and evicted as plain autograd would have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import SavedTensorModified
from tests.programs import SIDE, Evict, Program, gradients, leaf, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERYTHING = 1 << 40


@pytest.fixture
def session() -> Iterator[Any]:
    swapkit.install()
    with swapkit.budget("64MiB") as opened:
        yield opened


def changed_after_save(change: Callable[[torch.Tensor], object]) -> Program:
    def body(evict: Evict) -> list[torch.Tensor]:
        x = leaf()
        y = x * 1
        loss = (y * y).sum()
        change(y)
        del y
        evict()
        return gradients(loss, x)

    return body


@pytest.mark.parametrize(
    "change",
    [lambda y: y.add_(1), lambda y: y[0].zero_(), lambda y: y.detach().mul_(2), lambda y: y.t_()],
    ids=["tensor", "view", "detached", "transpose"],
)
def test_backward_when_a_saved_tensor_was_changed_in_place_then_raises_as_autograd_does(
    change: Callable[[torch.Tensor], object], session: Any
) -> None:
    body = changed_after_save(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        run(body, lambda: None)
    assert isinstance(raised.value, SavedTensorModified)
    with pytest.raises(SavedTensorModified, match="expected version"):
        run(body, lambda: session.rescue(EVERYTHING))


def test_parameters_when_changed_between_forward_and_backward_then_raises(session: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE))
    last = model[1].get_parameter("weight")
    loss = model(torch.randn(SIDE, SIDE)).sum()
    with torch.no_grad():
        last.add_(1)
    session.rescue(EVERYTHING)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_graph_when_dropped_then_device_and_host_memory_are_free_at_once(session: Any) -> None:
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    session.rescue(EVERYTHING)
    scheduler = session._active.swapper.scheduler
    assert scheduler.stats().host_bytes > 0
    del loss, x
    assert scheduler.stats().host_bytes == 0
    assert swapkit.memory_stats()["allocated_bytes.all.current"] == before


def test_unpacked_tensor_when_evicted_while_backward_uses_it_then_stays_whole(session: Any) -> None:
    x = leaf()
    y = (x * 0.1).exp()
    node: Any = y.grad_fn
    expected = y.detach().clone()
    del y
    session.rescue(EVERYTHING)
    held = node._saved_result
    session.rescue(EVERYTHING)
    assert torch.equal(held, expected)
