"""Kept results whose memory changes through pieces that have versions of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import swapkit

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH, RUNS = 4, 32, 3

pytestmark = pytest.mark.usefixtures("installation")


def keep_products(_context: object, operator: object, *_args: object, **_kwargs: object) -> object:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


OPTIONS: dict[str, dict[str, Any]] = {
    "save": {"save": ["addmm"]},
    "save, checked": {"save": ["addmm"], "check_values": True},
    "offload": {"offload": ["addmm"]},
    "policy": {"policy": keep_products},
}


class Gate(nn.Module):
    """Changes pieces of a product in place, below autograd's versions, as a GRU's kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = torch.unsafe_chunk(self.linear(x), 2, 1)
        result: torch.Tensor = gate.sigmoid_() * value.tanh_()
        return result


def make_gru() -> nn.Module:
    return nn.GRU(WIDTH, WIDTH)


def train(make: Callable[[], nn.Module], options: dict[str, Any] | None) -> list[torch.Tensor]:
    """Return the gradients of several runs: a region may go another way from its second one on."""
    torch.manual_seed(0)
    model = make()
    if options is not None:
        swapkit.checkpoint(model, **options)
    found = []
    for run in range(RUNS):
        torch.manual_seed(run)
        x = torch.randn(3, ROWS, WIDTH) if isinstance(model, nn.GRU) else torch.randn(ROWS, WIDTH)
        outputs = model(x)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        first.square().mean().backward()
        found += [each.grad for each in model.parameters() if each.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.parametrize("make", [make_gru, Gate], ids=["gru", "gate"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_kept_result_when_pieces_of_it_change_in_place_then_same_gradients(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    plain, kept = train(make, None), train(make, options)
    assert len(kept) == len(plain) > 0
    assert all(map(torch.equal, kept, plain))
