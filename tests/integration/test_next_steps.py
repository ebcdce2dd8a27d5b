"""Whether a recorded step is a model for the next ones: what it found, and what it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from swapkit._runtime.recording.trace_builder import count_growth, has_leftovers
from swapkit.ir.traces import BEFORE
from tests.support import installed
from tests.support.recorders import lives_of, recorded
from tests.support.sessions import in_use_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 128
BATCH = 4096  # more than all states
SMALL = 4096  # bytes: scalars, and what blocks have more than was asked for


@pytest.mark.parametrize("is_used", [False, True])
def test_memory_when_it_is_left_from_the_step_before_then_that_is_known(is_used: bool) -> None:
    with installed():
        held = [torch.ones(1 << 20)]
        x = torch.randn(WIDTH, requires_grad=True)

        def step() -> None:
            y = x.exp()
            if is_used:
                held[0].add_(1)
            held.clear()
            y.sum().backward()

        trace, recorder = recorded(step)
        assert [birth for birth, _ in lives_of(trace, 4 << 20)] == [BEFORE]
        assert has_leftovers(trace, recorder.storages) != is_used


class Program:
    """Trains steps with a batch each; still holds the outputs when the optimizer has stepped."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = make(self.model)
        self.outputs = torch.zeros(0)

    def loss(self) -> float:
        self.optimizer.zero_grad()
        self.outputs = self.model(torch.randn(BATCH, WIDTH))
        loss = self.outputs.square().mean()
        loss.backward()
        return float(loss.detach())

    def step(self) -> None:
        self.optimizer.step(self.loss)

    def growth(self) -> tuple[int, int]:
        """Record a step; return its growth, and the bytes that it left in the pool."""
        before = self._in_use_bytes()
        trace, recorder = recorded(self.step, self.model, self.optimizer)
        return count_growth(trace, recorder.storages), self._in_use_bytes() - before

    def _in_use_bytes(self) -> int:
        self.optimizer.zero_grad()
        self.outputs = torch.zeros(0)
        return in_use_bytes()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), foreach=True)  # whose temporaries go at its end


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def history(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)


@pytest.mark.parametrize(
    ("make", "growing_steps"), [(adam, 1), (momentum, 1), (descent, 0), (history, 4)]
)
def test_growth_when_the_optimizer_keeps_memory_then_it_is_the_bytes_that_stay(
    make: Callable[[nn.Module], torch.optim.Optimizer], growing_steps: int
) -> None:
    with installed():
        program = Program(make)
        for step in range(6):
            growth, left_bytes = program.growth()
            assert abs(growth - left_bytes) <= SMALL
            assert (growth > WIDTH * WIDTH) == (step < growing_steps)
