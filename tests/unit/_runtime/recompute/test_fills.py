"""What operators fill after autograd has saved it, in a region that runs again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from swapkit.registry import Recompute
from tests.programs import assert_same_bits
from tests.unit._runtime.recompute.test_captured import FULL, RUNS, SIDE, by_us

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
    """Return gradients of several runs; memory that nobody fills holds no number."""
    found = []
    for seed in range(RUNS):
        torch.manual_seed(seed)
        x = torch.randn(SIDE, SIDE, requires_grad=True)
        made = part(x.exp()) if terms is None else by_us(part, x.exp(), terms=terms)
        others = [torch.full((SIDE, SIDE), float("nan")) for _ in range(16)]
        del others
        made.sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


@with_all_terms
def test_rrelu_when_it_comes_last_in_a_region_then_same_bits_in_every_run(terms: Recompute) -> None:
    class Last(torch.nn.RReLU):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value - 1)  # numbers are drawn for what is negative

    assert_same_bits(gradients(Last(), terms), gradients(Last(), None))
