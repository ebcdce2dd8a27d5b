"""What the first run of a region leaves behind: what it found, and nothing of the user's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import swapkit
from swapkit._runtime.recompute.captured import why_twice
from tests.programs import assert_same_bits
from tests.support import MIB
from tests.unit._runtime.recompute.test_captured import (
    FULL,
    RUNS,
    by_torch,
    by_us,
    chain,
    gradient,
    memory_of,
    plainly,
)

pytestmark = pytest.mark.usefixtures("installation")


class InPlace(torch.nn.Module):
    """Saves what is changed in place, which no operator alone makes again."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            value = (value * 2).relu_()
        return value


def test_region_when_much_cannot_be_computed_again_then_others_like_it_run_twice() -> None:
    expected = gradient(plainly, InPlace())
    first, other = (swapkit.checkpoint(InPlace()) for _ in range(2))
    with pytest.warns(match=r"cannot recompute 2.00 MiB of it.*swapkit.keep"):
        gradient(plainly, first)
    assert_same_bits([gradient(plainly, each) for each in (first, other)], [expected] * 2)
    assert "cannot recompute 2.00 MiB of it" in why_twice(FULL, first)
    assert why_twice(FULL, other) == why_twice(FULL, first)
    assert why_twice(FULL, InPlace()) == ""  # it has not run
    assert memory_of(plainly, other)[0][0] <= memory_of(by_torch, InPlace())[0][0] + MIB // 8


class Activation(torch.nn.Module):
    """An activation that may change what it is handed, as torch's with `inplace` do."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = torch.relu_(value) if self.inplace else torch.relu(value)
        for _ in range(3):
            value = (value * 2).relu_()
        return value.exp()


def test_region_when_another_of_its_class_with_other_options_runs_twice_then_looked_at() -> None:
    gradient(plainly, swapkit.checkpoint(Activation(inplace=False)))
    part = swapkit.checkpoint(Activation(inplace=True))  # twice would be refused, as by torch's
    expected = gradient(plainly, Activation(inplace=True))
    assert_same_bits([gradient(plainly, part)], [expected])


class Draws(torch.nn.Module):
    """Keeps much of what it makes of numbers that a generator of its own gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            value = (value * torch.randn(value.shape, generator=self.numbers)).tanh()
        return value


def test_region_when_it_draws_from_a_generator_of_the_users_then_same_bits_in_every_run() -> None:
    def gradients(call: Any) -> list[torch.Tensor]:
        part = Draws()
        found = []
        for run in range(RUNS + 1):
            part.numbers.manual_seed(run)
            found.append(gradient(call, part))
        return [*found, part.numbers.get_state()]

    assert_same_bits(gradients(by_us), gradients(plainly))


def test_model_when_its_class_refers_to_it_then_it_goes_with_its_last_reference() -> None:
    def run_once() -> weakref.ref[torch.nn.Module]:
        class Own(torch.nn.Module):
            def forward(self, value: torch.Tensor) -> torch.Tensor:
                return chain(value) if model.training else value

        model = torch.nn.Sequential(Own())
        gradient(by_us, model)
        return weakref.ref(model)

    reference = run_once()
    gc.collect()
    assert reference() is None
