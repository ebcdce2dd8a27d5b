"""Pieces of one storage that are changed one by one, as recurrent cells do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import BEFORE
from swapkit.simulation.validation.gaps import find_gaps, find_touches
from tests.support.sessions import make_training, train_both

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace
    from tests.support.sessions import Training

WIDTH = 64
SHARE = 0.5
PLANNED = 4  # steps by which there is a plan


class Cell(nn.Module):
    """Changes the second piece of a storage after the first was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.linear(x).unsafe_chunk(2, 1)
        result: torch.Tensor = gate.sigmoid_() * value.tanh_()
        return result


pytestmark = pytest.mark.usefixtures("installation")


def make_cells() -> Training:
    return make_training(lambda: nn.Sequential(*[Cell() for _ in range(6)]))


class SwapAll:
    """Swaps whatever may be swapped."""

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        decisions = tuple(
            Decision(storage=number, action=Action.SWAP)
            for number in sorted(find_gaps(trace, find_touches(trace)))
            if trace.storages[number].birth != BEFORE
        )
        return Plan(decisions=decisions, budget_bytes=machine.budget_bytes)


@pytest.mark.parametrize("policy", ["auto", "swap", SwapAll()], ids=["auto", "swap", "own"])
def test_pieces_when_changed_after_another_was_saved_then_same_bits(policy: str | SwapAll) -> None:
    log = train_both(make_cells, 0.8, 10, policy=policy)
    assert log.session.plan is not None or log.stages[-1] == "stable"


class Halves(nn.Module):
    """Saves both halves of a storage, each changed as often as the other, or one of them not."""

    is_changed = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.linear(x).unsafe_chunk(2, 1)
        gate.mul_(0.5)
        x = x + gate.cos()
        time.sleep(0.003)  # the copy is made
        value = value.mul_(0.5) if self.is_changed else value.mul(0.5)
        return torch.add(x, value.cos())


def test_pieces_when_one_is_changed_in_later_steps_only_then_same_bits() -> None:
    def before(training: Training, step: int) -> None:
        for each in training.model.children():
            assert isinstance(each, Halves)
            each.is_changed = step >= PLANNED

    def make() -> Training:
        return make_training(lambda: nn.Sequential(*[Halves() for _ in range(6)]))

    log = train_both(make, SHARE, PLANNED + 2, before, policy=SwapAll())
    assert log.stages[PLANNED - 1] == "stable"
    assert log.session.stats.swapped_out_bytes > 0


@pytest.mark.parametrize(("policy", "share"), [("auto", 0.7), ("recompute", 0.95)])
def test_recurrent_model_when_planned_then_same_bits(policy: str, share: float) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.cells(x.unflatten(0, (16, -1)))[0]
            return result.flatten(0, 1)

    train_both(lambda: make_training(Recurrent), share, 10, policy=policy)
