"""Regions of a user's that are interrupted: at every place where a signal handler may raise."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.recompute import captured
from swapkit._runtime.recompute.region_findings import Known
from swapkit._runtime.saved import hooks
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat import dispatch_modes
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from tests.unit._runtime.rig import count_places, interrupts

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
    gc.collect()  # else finalizers of what other tests left run inside of the region
    stack = torch._C._autograd._top_saved_tensors_default_hooks
    before = in_use()
    nth, places = 1, count_places(lambda: region(x))
    while interrupts(nth, lambda: region(x)):
        assert not hooks.is_in_region(), nth
        with swapkit.keep():  # takes off what is left
            pass
        assert stack(True) is None, nth
        assert thread_state.hooks == [], nth
        assert len(mode_stack()) == 0, nth
        assert in_use() == before, nth
        assert torch.ones(1, requires_grad=True).sum().requires_grad, nth
        if is_first:
            monkeypatch.setattr(captured, "_known", Known())
        nth += 1 if nth < 400 else 7
        assert nth < MOST
    assert nth > places // 10, (nth, places)
    region(x).sum().backward()
    assert torch._C._autograd._saved_tensors_hooks_disable is hooks._torchs_disable


@pytest.mark.usefixtures("late_modes")
@pytest.mark.parametrize(
    "options", [{"save": ["addmm"], "check_values": True}, {"offload": ["mm"]}]
)
@pytest.mark.parametrize("again", [False, True], ids=["forward", "backward"])
def test_region_with_modes_when_interrupted_as_one_is_entered_then_none_is_left(
    again: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    region: nn.Module = swapkit.checkpoint(nn.Sequential(nn.Linear(WIDTH, WIDTH)), **options)
    replace = dispatch_modes._set_late
    assert replace is not None
    entered = 0

    def replace_and_stop(modes: tuple[dispatch_modes.DispatchMode, ...]) -> int:
        nonlocal entered
        is_more = len(modes) > len(mode_stack())
        key = replace(modes)
        entered += is_more
        if is_more and entered == wanted:
            raise KeyboardInterrupt
        return key

    for wanted in (1, 2):  # noqa: B007 - `replace_and_stop` reads it
        loss = region(torch.randn(4, WIDTH)).sum()
        entered = 0
        with monkeypatch.context() as patch:
            patch.setattr(dispatch_modes, "_set_late", replace_and_stop)
            if again:
                with suppress(KeyboardInterrupt):
                    loss.backward()
            else:
                with suppress(KeyboardInterrupt):
                    region(torch.randn(4, WIDTH))
        assert entered > 0
        assert len(mode_stack()) == 0
        region(torch.randn(4, WIDTH)).sum().backward()
