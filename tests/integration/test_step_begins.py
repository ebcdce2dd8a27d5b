"""Where the steps of a session begin if its model is not called as a whole."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit.ir.traces import Phase
from swapkit.testing import planning_at_once
from tests.support.sessions import Plain, Training, in_use_bytes, train

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, ROWS, PARTS = 64, 1024, 4
LEFT_BYTES = ROWS * WIDTH * 4 * 2  # a batch and an output
STEPS = 10

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


class Part(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.down(nn.functional.gelu(self.up(x))))


class InParts(Training):
    """Trains the parts of a model one after the other. What a step leaves, the next one frees."""

    def apply(self, part: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = part(x)
        return result

    def between(self) -> None:
        """Run between two steps, while gradients and output of the former one exist."""

    def step(self) -> None:
        torch.manual_seed(self.steps_done)
        self.between()
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.batch = x = torch.randn(ROWS, WIDTH)
        self.output = None
        for part in self.model.children():
            x = self.apply(part, x)
        loss = x.square().mean()
        loss.backward()
        self.results.append(float(loss.detach()).hex())
        self.optimizer.step()
        self.output = x.detach()
        self.steps_done += 1


class ByFunctions(InParts):
    """Calls no module."""

    def apply(self, part: Any, x: torch.Tensor) -> torch.Tensor:
        linear, gelu = nn.functional.linear, nn.functional.gelu
        inner = gelu(linear(x, part.up.weight, part.up.bias))
        return linear(inner, part.down.weight, part.down.bias) + x


class WithMetrics(InParts):
    """Calls modules of others between two steps, and parts without gradients."""

    def between(self) -> None:
        if self.steps_done:
            nn.Identity()(self.output)
            with torch.no_grad():
                self.apply(next(self.model.children()), self.batch)


def make(kind: type[InParts]) -> InParts:
    torch.manual_seed(0)
    model = nn.ModuleList([Part() for _ in range(PARTS)])
    return kind(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train_plainly(kind: type[InParts]) -> Plain:
    """Train without a session; the peak is that of steps after the first."""
    training = make(kind)
    training.step()
    swapkit.reset_peak_memory_stats()
    for _ in range(STEPS - 1):
        training.step()
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    return Plain(training.outcome(), peak_bytes, in_use_bytes())


WAYS: dict[str, tuple[type[InParts], Callable[[InParts], nn.Module | None]]] = {
    "parts of the model": (InParts, lambda training: training.model),
    "modules without a model": (InParts, lambda _: None),
    "functions with a model": (ByFunctions, lambda training: training.model),
    "functions without a model": (ByFunctions, lambda _: None),
    "modules of others between": (WithMetrics, lambda training: training.model),
}


@pytest.mark.parametrize("way", WAYS)
def test_step_when_the_model_is_not_called_then_it_begins_without_what_the_last_one_left(
    way: str,
) -> None:
    kind, find_model = WAYS[way]
    gc.collect()
    others_bytes = in_use_bytes()  # as the frames of a test that failed hold
    plain = train_plainly(kind)
    training = make(kind)
    limit = plain.budget(0.7)
    with (
        planning_at_once(),
        swapkit.budget(limit, find_model(training), training.optimizer, search_steps=2) as session,
    ):
        log = train(session, training, STEPS)
        trace, plan = session.trace, session.plan
        assert trace is not None
        assert plan is not None
        assert session.stats.step_seconds is not None
    assert training.outcome() == plain.outcome
    assert abs(trace.peak_bytes / plain.peak_bytes - 1) <= 0.02
    assert trace.base_bytes - others_bytes < LEFT_BYTES // 4
    assert plan.decisions
    assert log.rescues_since(-2) == 0


@pytest.mark.parametrize("kind", [InParts, ByFunctions])
def test_step_when_it_begins_with_a_saved_tensor_then_its_operator_is_recorded(
    kind: type[InParts],
) -> None:
    training = make(kind)
    model = training.model if kind is InParts else None
    with planning_at_once(), swapkit.budget("1GiB", model, training.optimizer) as session:
        train(session, training, 3)
        trace = session.trace
    assert trace is not None
    forward = [each.name for each in trace.operators if each.phase is Phase.FORWARD]
    assert sum("addmm" in name for name in forward) == 2 * PARTS


def test_step_when_a_part_is_called_before_the_model_then_it_begins_with_the_model() -> None:
    model = nn.Sequential(*[Part() for _ in range(PARTS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with planning_at_once(), swapkit.budget("1GiB", model, optimizer, profile_steps=1) as session:
        for _ in range(2):
            x = model[0](torch.randn(ROWS, WIDTH))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trace = session.trace
    assert trace is not None
    forward = [each.name for each in trace.operators if each.phase is Phase.FORWARD]
    assert sum("addmm" in name for name in forward) == 2 * PARTS
