"""Compiled graphs whose tensors share memory in ways that torch's traces do not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config
import torch.distributed._functional_collectives
from torch import nn

import swapkit
from tests.support.compiled_programs import ROWS, WIDTH, without_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensors = tuple[torch.Tensor, ...]

pytestmark = [
    pytest.mark.usefixtures("installation"),
    # Of `wait_tensor` in torch 2.10.
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):  # no pool of threads that outlives this
        yield
    torch._dynamo.reset()


# Torch computes equal parts once. What stands behind the second one has its storage in the traces.


def with_results(x: torch.Tensor, weight: torch.Tensor, _buffer: torch.Tensor) -> Tensors:
    first, second = (nn.functional.layer_norm(x @ weight, (WIDTH,)) for _ in range(2))
    return first.exp() * first, second.view(-1)


def with_view(x: torch.Tensor, weight: torch.Tensor, _buffer: torch.Tensor) -> Tensors:
    first, second = ((x @ weight).tanh() for _ in range(2))
    view = second.view(-1)
    return ((first * first.sin()) @ weight).exp(), view * 2 + 1


def with_pieces(x: torch.Tensor, weight: torch.Tensor, _buffer: torch.Tensor) -> Tensors:
    first, second = (x @ weight for _ in range(2))
    hidden = first.sin()
    pieces = second.split(WIDTH // 2, dim=1)
    return hidden, pieces[0].cos(), pieces[1].exp()


def with_hidden_pieces(x: torch.Tensor, weight: torch.Tensor, _buffer: torch.Tensor) -> Tensors:
    first, second = (x @ weight for _ in range(2))
    hidden = first.sin()
    pieces = torch.unsafe_split(second, WIDTH // 2, 1)
    return hidden, pieces[0].cos(), pieces[1].exp()


def with_wait(x: torch.Tensor, weight: torch.Tensor, _buffer: torch.Tensor) -> Tensors:
    hidden = x @ weight
    awaited = torch.ops._c10d_functional.wait_tensor(hidden)  # returns its operand
    return hidden.sin(), awaited.cos(), awaited


def with_set(x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> Tensors:
    hidden = x @ weight
    with torch.no_grad():
        buffer.data = hidden.detach()
    return (hidden.sin(),)


FUNCTIONS = (with_results, with_view, with_pieces, with_hidden_pieces, with_wait, with_set)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_graph_when_tensors_share_memory_unseen_then_none_loses_it(
    backend: str, function: Callable[..., Tensors]
) -> None:
    given = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH)

    def train() -> list[torch.Tensor]:
        torch._dynamo.reset()
        x, weight, buffer = (each.clone() for each in given)
        leaves = x.requires_grad_(), weight.requires_grad_()
        results = torch.compile(function, backend=backend)(x, weight, buffer)
        loss = torch.stack([each.sum() for each in results]).sum()
        gradients = torch.autograd.grad(loss, leaves)
        tensors = [*results, buffer, *gradients]
        assert all(each.untyped_storage().nbytes() for each in tensors)
        return tensors

    with without_operators():
        expecteds = train()
    with swapkit.offload(min_bytes=1):
        for found, expected in zip(train(), expecteds, strict=True):
            assert torch.equal(found, expected)
