"""Regions of a user's that are interrupted: at every place where a signal handler may raise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack

import swapkit
from swapkit._runtime.recompute import captured
from swapkit._runtime.saved import hooks
from swapkit._runtime.thread_state import thread_state
from tests.unit._runtime.rig import interrupts

pytestmark = pytest.mark.usefixtures("installation")

WIDTH = 64
MOST = 20_000


def make_region() -> nn.Module:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    region: nn.Module = swapkit.checkpoint(block)
    return region


def in_use() -> int:
    return int(swapkit.memory_stats()["allocated_bytes.all.current"])


@pytest.mark.parametrize("is_first", [True, False])
def test_region_when_interrupted_anywhere_then_nothing_of_it_is_left_open(
    *, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(256, WIDTH)
    region = make_region()
    region(x).sum().backward()
    stack = torch._C._autograd._top_saved_tensors_default_hooks
    before = in_use()
    nth = 1
    while interrupts(nth, lambda: region(x)):
        assert not hooks.is_in_region(), nth
        with swapkit.keep():  # takes off what is left
            pass
        assert stack(True) is None, nth
        assert thread_state.hooks == [], nth
        assert _len_torch_dispatch_stack() == 0, nth
        assert in_use() == before, nth
        assert torch.ones(1, requires_grad=True).sum().requires_grad, nth
        if is_first:
            monkeypatch.setattr(captured, "_known", captured._Known())
        nth += 1 if nth < 400 else 7
        assert nth < MOST
    assert nth > 50
    region(x).sum().backward()
    assert torch.autograd.graph.disable_saved_tensors_hooks is hooks._disable
