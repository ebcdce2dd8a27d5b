"""Backward passes go without hooks where a plan is followed that saves nothing in them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit._runtime.hooks import innermost
from tests.support.sessions import Block, Training, make_training, train_both

BLOCKS = 4
SETTLED = 16  # steps by which a session is stable
STEPS = 20
SHARES = (0.5, 2.0)

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
seen: list[bool] = []  # by step: whether there were hooks in backward


class Looking(torch.autograd.Function):
    """Passes a tensor on; notes in backward whether there are hooks."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(_top_hooks(True) is not None)
        return gradient


class Blocks(nn.Sequential):
    """Looks behind its first block; may compute the second one again, as torch's checkpoint."""

    def __init__(self, *, is_repeated: bool) -> None:
        super().__init__(*[Block() for _ in range(BLOCKS)])
        self.is_repeated = is_repeated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self):
            if number == 1:
                x = Looking.apply(x)
            if number == 1 and self.is_repeated:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return x


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


def make(*, is_repeated: bool = False) -> Training:
    return make_training(partial(Blocks, is_repeated=is_repeated))


@pytest.mark.parametrize("share", SHARES)
def test_backward_when_nothing_is_saved_in_it_then_it_goes_without_hooks(share: float) -> None:
    log = train_both(make, share, STEPS)
    assert log.stages[SETTLED] == "stable"
    assert seen[STEPS:][0]
    assert not any(seen[STEPS + SETTLED + 1 :])
    assert _top_hooks(True) is None


def test_backward_when_something_is_saved_in_it_then_hooks_see_it() -> None:
    train_both(partial(make, is_repeated=True), 2.0, STEPS)
    assert all(seen[STEPS:])


def test_backward_when_its_own_graph_is_kept_then_hooks_see_it() -> None:
    x = torch.ones(4, requires_grad=True)
    with swapkit.keep():
        hooks = innermost()
        assert hooks is not None
        hooks.packer.rests = True
        for is_kept in (True, False):
            loss = Looking.apply(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=is_kept)
            assert gradient.requires_grad == is_kept
            assert innermost() is hooks
    assert seen == [True, False]
