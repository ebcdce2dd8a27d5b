"""A model of several parts with an optimizer each, as torchtitan's: one session, one plan."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit.errors import InvalidArgument
from swapkit.testing import planning_at_once
from tests.support.sessions import (
    TOKENS,
    WIDTH,
    Block,
    Plain,
    Training,
    digest,
    train,
    train_plainly,
)

STEPS = 12
MICROBATCHES = 2

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


class Part(nn.Module):
    """Some layers of a model, as torchtitan's parts: a dict of them."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Container(torch.optim.Optimizer):
    """Steps an optimizer for each part, as torchtitan's `OptimizersContainer`."""

    def __init__(self, parts: list[Part]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        super().__init__([each for part in parts for each in part.parameters()], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step(closure)


@dataclass
class Chunks(Training):
    """Runs the microbatches through the first part, then through the second, then backward."""

    parts: list[Part] = field(default_factory=list)

    def step(self) -> None:
        torch.manual_seed(self.steps_done)
        batches = [torch.randn(TOKENS, WIDTH) for _ in range(MICROBATCHES)]
        middles = [self.parts[0](batch) for batch in batches]
        losses = [self.parts[1](middle).square().mean() for middle in middles]
        del middles
        for loss in losses:
            loss.backward()
            self.results.append(float(loss.detach()).hex())
        del losses, loss
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        self.results.append(digest(gradients))
        del gradients
        assert self.optimizer is not None
        self.optimizer.step()
        self.model.zero_grad()
        self.steps_done += 1


def make() -> Chunks:
    torch.manual_seed(0)
    parts = [Part(range(3)), Part(range(3, 6))]
    return Chunks(nn.ModuleList(parts), Container(parts), parts=parts)


@functools.cache
def plain() -> Plain:
    return train_plainly(make, STEPS)


def attributes(training: Chunks) -> list[list[str]]:
    return [sorted(vars(module)) for part in training.parts for module in part.modules()]


@pytest.mark.parametrize("given", ["container", "list", "none"])
def test_session_when_given_parts_and_optimizers_then_it_counts_plans_and_keeps_the_bits(
    given: str,
) -> None:
    training = make()
    container: Any = training.optimizer
    optimizer = {"container": container, "list": container.optimizers, "none": None}[given]
    before = attributes(training)
    limit_bytes = plain().budget(0.8)
    with swapkit.budget(limit_bytes, training.parts, optimizer, search_steps=2) as session:
        with planning_at_once():
            train(session, training, STEPS)
        assert attributes(training) == before
        assert session.stats.steps == STEPS
        assert session.stage == "stable"
        assert session.plan is not None
        trace = session.trace
    assert training.outcome() == plain().outcome
    assert trace is not None
    modules = [operator.module for operator in trace.operators if operator.module]
    assert modules[0].startswith("0.layers.0.")
    assert {name[:10] for name in modules} == {f"{i // 3}.layers.{i}" for i in range(6)}
    assert {operator.microbatch for operator in trace.operators} == set(range(MICROBATCHES))
    # The step begins with the first part's call: what the last one left counts as no more.
    assert trace.bytes_before < plain().between_bytes * 1.05


def test_session_when_the_model_is_a_list_of_modules_that_are_called_then_likewise() -> None:
    training = make()
    with swapkit.budget(plain().budget(0.8), training.model, search_steps=2) as session:
        with planning_at_once():
            train(session, training, STEPS)
        assert session.stats.steps == STEPS
        assert session.plan is not None
    assert training.outcome() == plain().outcome


def test_record_and_estimate_when_given_parts_then_modules_have_the_parts_names() -> None:
    training = make()
    container: Any = training.optimizer
    training.step()
    trace = swapkit.record(training.step, training.parts, container)
    assert any(operator.module.startswith("1.layers.5") for operator in trace.operators)
    before = training.outcome()[-2:]
    found = swapkit.estimate(training.step, training.parts, container)
    assert found.smallest_budget_bytes < found.plain_bytes
    assert training.outcome()[-2:] == before


def test_choices_when_given_parts_then_paths_begin_with_their_numbers() -> None:
    parts = make().parts
    assert swapkit.offload(parts, r"0\.layers\.\d") is parts
    swapkit.checkpoint(parts, r"1\.layers\.4")
    swapkit.keep(parts)
    wheres = [row.where for row in swapkit.choices(parts)]
    assert wheres == ["0", "0.layers.0", "0.layers.1", "0.layers.2", "1", "1.layers.4"]
    swapkit.choices(parts).remove()
    assert len(swapkit.choices(parts)) == 0
    with pytest.raises(InvalidArgument, match="its paths begin with: 0, "):
        swapkit.offload(parts, r"layers\.0")
