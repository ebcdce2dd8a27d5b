"""Training loops that overwrite the batch as soon as forward has read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import swapkit
from tests.support.sessions import CustomTraining, in_use_bytes, train, train_plainly

STEPS = 10
LATE = 6  # by this step a plan is followed
BATCH, WIDTH, BRANCHES = 4096, 64, 8

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


class Shifted(nn.Module):
    """Autograd saves what it makes of its input, and not the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.scores = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores((x - self.shift).tanh())  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Several of these, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Shifted() for _ in range(BRANCHES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


@dataclass
class Staged(CustomTraining):
    """One buffer for all batches: the next one is there before backward begins."""

    batch: torch.Tensor = field(default_factory=lambda: torch.randn(BATCH, WIDTH))

    def refill(self) -> None:
        """Overwrite the batch as a loader does whose arrays torch only looks at."""
        self.batch.numpy()[:] = torch.randn(BATCH, WIDTH).numpy()

    def loss(self) -> float:
        assert self.optimizer is not None
        loss = self.model(self.batch).square().mean()
        self.refill()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@dataclass
class Late(Staged):
    """Steps that were recorded did not overwrite anything."""

    def refill(self) -> None:
        if self.steps_done > LATE:
            self.batch.copy_(torch.randn(BATCH, WIDTH))


def make_staged(kind: type[Staged]) -> Staged:
    torch.manual_seed(0)
    model = Branches()
    return kind(model, torch.optim.Adam(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("kind", [Staged, Late])
@pytest.mark.parametrize("policy", ["recompute", "auto"])
def test_batch_when_overwritten_before_backward_then_same_bits(
    kind: type[Staged], policy: str
) -> None:
    in_use_bytes()  # what former tests have left behind goes now
    plain = train_plainly(lambda: make_staged(kind), STEPS)
    training = make_staged(kind)
    limit_bytes = int(plain.peak_bytes * 0.7)
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy=policy) as session:
        train(session, training, STEPS)
        assert session.stage == "stable"
    assert training.outcome() == plain.outcome
