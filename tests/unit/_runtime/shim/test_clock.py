"""The clock of operators rings where an alarm is due, and nowhere else."""

from __future__ import annotations

import gc

import pytest
import torch

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import PlannedMove
from swapkit._runtime.shim.types import Placement
from swapkit.ir.plans import Action
from tests.unit._runtime.rig import make_swapper, scope

pytestmark = pytest.mark.usefixtures("installation")

SIDE = 64
PLANNED = Placement(Action.SWAP, prefetch=2)


def rings() -> int:
    return get_runtime().shim.clock_rings()


def test_clock_when_nothing_is_planned_then_only_the_beginning_of_backward_rings() -> None:
    gc.collect()
    x = torch.ones(4, requires_grad=True)
    x * 2  # alarms of other tests
    before = rings()
    y = (x * 2).exp().sum()
    assert rings() == before
    y.backward()
    assert rings() <= before + 1


def test_alarm_when_its_swapper_is_gone_then_it_rings_no_more() -> None:
    swapper = make_swapper()
    hidden = torch.ones(SIDE, SIDE, requires_grad=True) * 1.0
    with scope(swapper, PLANNED):
        hidden = torch.sin(hidden)
    del hidden, swapper
    gc.collect()
    before = rings()
    other = torch.ones(4, requires_grad=True)
    for _ in range(20):
        other = other.sin()
    assert rings() == before


def test_alarms_when_two_swappers_have_some_then_each_is_rung() -> None:
    runtime = get_runtime()
    runtime.trace = moves = list[PlannedMove]()
    try:
        hidden = torch.ones(SIDE, SIDE, requires_grad=True) * 1.0
        swappers = make_swapper(), make_swapper()
        for layer in range(12):
            with scope(swappers[layer % 2], PLANNED):
                hidden = torch.sin(hidden)
        hidden.sum().backward()
    finally:
        runtime.trace = None
    released = [move for move in moves if move.kind == "release"]
    assert len(released) >= 6
    ahead = {move.operator - move.saved_by for move in moves if move.kind == "prefetch"}
    assert ahead == {2}
