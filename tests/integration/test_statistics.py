"""Operators that read running statistics, which a batch norm elsewhere then updates.

Torch counts no version of that: a repetition has to use the statistics as they were.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swapkit._runtime.execution.plan_compiler import sign
from swapkit.registry import Recompute
from tests.support.operators import choose
from tests.support.sessions import Training, train_both, train_plainly
from tests.support.stateful import RecomputeAll

WIDTH = 64
ROWS = 512
STEPS = 8
SWITCHED = 5
PLENTY = 3.0

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("A3")]


class Centred(nn.Module):
    """Reads the statistics of another module."""

    def forward(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, mean).sin()


class Model(nn.Module):
    """Uses statistics as they are before a norm at its end updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.still = nn.BatchNorm1d(WIDTH).eval()
        self.still.running_mean, self.still.running_var = (
            self.norm.running_mean,
            self.norm.running_var,
        )
        self.centred = Centred()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.still(self.layer(x)).cos()
        x = self.centred(self.layer(x), self.norm.running_mean)
        made: torch.Tensor = self.norm(x)
        return made


def make_training() -> Training:
    torch.manual_seed(0)
    model = Model()
    return Training(model, torch.optim.AdamW(model.parameters(), 1e-2), tokens=ROWS)


def test_statistics_when_updated_in_another_module_then_a_chosen_operator_uses_the_former() -> None:
    plain = train_plainly(make_training, STEPS)
    training = make_training()
    model: Any = training.model
    for module in (model.centred, model.still):
        choose(module, {".*": Recompute()}, model)
    for _ in range(STEPS):
        training.step()
    assert training.outcome() == plain.outcome


def test_statistics_when_a_norm_inside_begins_to_train_then_same_bits_and_another_plan() -> None:
    def switch(training: Training, step: int) -> None:
        training.model.get_submodule("norm").train(step >= SWITCHED)

    policy = RecomputeAll()
    log = train_both(make_training, PLENTY, STEPS, switch, policy=policy, search_steps=1)
    assert policy.recomputed > 0
    assert log.stages[SWITCHED - 1 :] == ["stable", "warmup", "stable", "stable"]


def test_signatures_when_a_module_inside_is_switched_then_they_differ() -> None:
    model = Model()
    model.still.train()
    first = sign(model, [torch.ones(2)])
    model.still.eval()
    second = sign(model, [torch.ones(2)])
    model.still.train()
    model.norm.eval()
    third = sign(model, [torch.ones(2)])
    assert len({first, second, third}) == 3
    model.eval()
    assert sign(model, [torch.ones(2)]) not in {first, second, third}


def test_signature_when_all_modules_train_then_it_is_that_of_saved_plans() -> None:
    assert sign(Model().train(), [torch.ones(2), 3, True]) == "c6ffbe3d6b7fe75d"
