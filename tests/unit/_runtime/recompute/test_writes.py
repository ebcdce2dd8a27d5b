"""What a region writes to: once, though it runs twice; and what is filled after it was saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from swapkit._runtime.recompute.captured import why_twice
from swapkit.registry import Recompute
from tests.programs import assert_same_bits
from tests.unit._runtime.recompute.test_captured import FULL, RUNS, SIDE, by_us, gradient, plainly

pytestmark = pytest.mark.usefixtures("installation")


def prefer_again(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


TERMS = {
    "captured": FULL,
    "offload": Recompute(offload=("mul",)),
    "policy": Recompute(policy=prefer_again),
    "check_values": Recompute(check_values=True),
}
with_all_terms = pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())


def gradients(part: torch.nn.Module, terms: Recompute | None) -> list[torch.Tensor]:
    """Return gradients of several runs, and the buffers after each."""

    def run(function: Any, *args: Any) -> Any:
        return plainly(function, *args) if terms is None else by_us(function, *args, terms=terms)

    found: list[torch.Tensor] = []
    for _ in range(RUNS):
        found.append(gradient(run, part))
        found += [each.clone() for each in part.buffers()]
    return found


@with_all_terms
def test_rrelu_when_it_comes_last_in_a_region_then_same_bits_in_every_run(terms: Recompute) -> None:
    class Last(torch.nn.RReLU):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value - 0.25)  # numbers are drawn for what is negative

    assert_same_bits(gradients(Last(), terms), gradients(Last(), None))


class Counting(torch.nn.Module):
    """Updates statistics, and reads what it updates; keeps much that cannot be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(SIDE)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(SIDE))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(value.mean(0))
        value = self.norm(value).tanh() * self.mean
        return torch.nn.functional.dropout(value, 0.5).relu_().exp()


class Unseen(Counting):
    """Runs twice, since a kernel writes that torch does not see."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value.exp()
        value.detach().numpy()[:] += 1
        return super().forward(value)


@with_all_terms
@pytest.mark.parametrize("kind", [Counting, Unseen])
def test_buffers_when_a_region_updates_them_then_as_in_plain_training(
    kind: type[Counting], terms: Recompute
) -> None:
    assert_same_bits(gradients(kind(), terms), gradients(kind(), None))


def test_region_when_it_updates_buffers_then_it_runs_once_however_much_it_keeps() -> None:
    class Own(Counting):
        """Nothing is known of others like it."""

    part = Own()
    gradients(part, FULL)
    assert why_twice(FULL, part) == ""


def test_region_when_it_changes_its_input_in_place_then_it_runs_once_and_bits_are_plain() -> None:
    class Activated(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(value.relu_(), 0.5).exp()

    part = Activated()
    assert_same_bits(gradients(part, FULL), gradients(Activated(), None))
    assert why_twice(FULL, part) == ""


def test_regions_when_nested_and_run_twice_then_buffers_as_in_plain_training() -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Counting()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            inside: torch.Tensor = by_us(self.inside, value.sin(), terms=TERMS["offload"])
            return inside.cos()

    class Plain(Around):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            inside: torch.Tensor = self.inside(value.sin())
            return inside.cos()

    for terms in (FULL, TERMS["offload"]):
        assert_same_bits(gradients(Around(), terms), gradients(Plain(), None))


def test_pass_when_it_retains_its_graph_then_buffers_as_after_forward() -> None:
    part = Counting()
    x = torch.ones(SIDE, SIDE, requires_grad=True)
    loss = by_us(part, x * 0.5, terms=TERMS["offload"]).sum()
    expected = [each.clone() for each in part.buffers()]
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        assert_same_bits(list(part.buffers()), expected)
