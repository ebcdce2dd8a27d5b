"""What the tests of scopes share: a model, its gradients, and that nothing of a scope is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved import hooks as hooks_module
from swapkit._runtime.thread_state import thread_state

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 48
ROOMY = 1 << 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIDE, SIDE)
        self.down = nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Say something."""
        hidden: torch.Tensor = torch.tanh(self.up(x)) * scale
        out: torch.Tensor = self.down(hidden).sin()
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.exp().sum()


def make_model() -> Model:
    torch.manual_seed(3)
    return Model()


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()


def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = leaf()
    (grad,) = torch.autograd.grad(run(x).sum(), x)
    return grad


def copied() -> int:
    """Return the bytes that the process's own swapper has copied out so far."""
    return get_runtime().default_swapper(get_runtime().cpu).scheduler.stats().copied_out_bytes


def assert_gone() -> None:
    assert thread_state.scopes == []
    assert thread_state.hooks == []
    assert hooks_module._top() is None
    assert not get_runtime().tracker._users
