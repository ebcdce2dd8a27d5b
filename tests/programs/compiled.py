"""Compiled submodules: hooks fire on real tensors, between compiled blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
from torch import nn

from tests.programs.registry import SIDE, Evict, program


class Block(nn.Module):
    """A module of the user's: `Module.compile` compiles none of torch's own classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.layer(x))


def train_compiled(evict: Evict, backend: str, count: int) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(22)
    model = nn.Sequential(*[Block() for _ in range(count)])
    for block in model:
        block.compile(backend=backend)
    grads: list[Any] = []
    for _ in range(2):
        loss = model(torch.randn(SIDE, SIDE)).square().sum()
        evict()
        loss.backward()
        grads += [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return grads


@program("G18")
def compiled_blocks(evict: Evict) -> list[torch.Tensor]:
    return train_compiled(evict, "aot_eager", 2)


@program("G18")
def blocks_compiled_by_inductor(evict: Evict) -> list[torch.Tensor]:
    with torch._inductor.config.patch(compile_threads=1):  # no pool that outlives this
        return train_compiled(evict, "inductor", 1)


@program("G18")
def whole_function_compiled_without_graph_breaks(evict: Evict) -> list[torch.Tensor]:
    torch._dynamo.reset()
    x = torch.randn(SIDE, SIDE, requires_grad=True)

    def function(value: torch.Tensor) -> torch.Tensor:
        return (value @ value).mul(0.1).tanh().exp()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    hidden = (x * 2).sin()
    loss = compiled(hidden).sum()
    del hidden
    evict()
    return list(torch.autograd.grad(loss, x))


@program("G18")
def graph_break_inside_a_compiled_function(evict: Evict) -> list[torch.Tensor]:
    torch._dynamo.reset()
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    unseen: Any = torch.compiler.disable(evict)

    def function(value: torch.Tensor) -> torch.Tensor:
        hidden = (value @ value).mul(0.1).tanh()
        torch._dynamo.graph_break()
        unseen()
        return hidden.exp()

    loss = torch.compile(function, backend="aot_eager")(x * 2).sum()
    evict()
    return list(torch.autograd.grad(loss, x))
