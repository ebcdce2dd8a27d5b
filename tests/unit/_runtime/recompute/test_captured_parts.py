"""What the first run of a region leaves behind: nothing of the user's, and no wrong numbers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.programs import assert_same_bits
from tests.unit._runtime.recompute.test_captured import RUNS, by_us, chain, gradient, plainly

pytestmark = pytest.mark.usefixtures("installation")


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
