"""Programs that run backward several times in a step, or the whole step again: they get plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit.ir.plans import Action
from tests.support.sessions import CustomTraining, Training, in_use_bytes, train, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 10
SETTLED = 3  # of these, the last ones need no rescue
BATCH = 4096
WIDTH = 64

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


def make_layers(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, WIDTH), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


class ActorCritic(nn.Module):
    """A trunk with two heads, and a moving average of what it is given."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_layers(32, WIDTH)
        self.actor, self.critic = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 1)
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.average.lerp_(x.mean(0), 0.1)
        hidden = self.trunk(x - self.average)
        return self.actor(hidden), self.critic(hidden)[:, 0]


class ProximalPolicy(CustomTraining):
    """Three losses of one forward, each with a backward pass of its own."""

    def loss(self) -> float:
        assert self.optimizer is not None
        observed, actions = torch.randn(BATCH, 32), torch.randint(0, 8, (BATCH, 1))
        advantages, returns = torch.randn(BATCH), torch.randn(BATCH)
        with torch.no_grad():
            former = self.model(observed)[0].log_softmax(-1).gather(1, actions)[:, 0]
        scores, values = self.model(observed)
        logs = scores.log_softmax(-1)
        ratio = (logs.gather(1, actions)[:, 0] - former).exp()
        clipped = ratio.clamp(0.8, 1.2)
        policy = -torch.min(ratio * advantages, clipped * advantages).mean()
        value = (values - returns).square().mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        policy.backward(retain_graph=True)
        (0.5 * value).backward(retain_graph=True)
        (-0.01 * entropy).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float((policy + value - entropy).detach())


class GradientPenalty(CustomTraining):
    """A critic whose loss has the norm of a gradient: a backward pass through a backward pass."""

    def loss(self) -> float:
        assert self.optimizer is not None
        real, fake = torch.randn(BATCH, 32), torch.randn(BATCH, 32)
        shares = torch.rand(BATCH, 1)
        mixed = (shares * real + (1 - shares) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        loss = self.model(fake).mean() - self.model(real).mean() + 10 * penalty
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Closure(CustomTraining):
    """An optimizer that runs forward and backward as often as it likes."""

    def loss(self) -> float:
        assert self.optimizer is not None
        given, wanted = torch.randn(BATCH, 32), torch.randn(BATCH, 1)

        def evaluate() -> float:
            self.optimizer.zero_grad()  # type: ignore[union-attr]
            loss = (self.model(given) - wanted).square().mean()
            loss.backward()
            return float(loss.detach())

        return float(self.optimizer.step(evaluate))


def make_proximal_policy() -> Training:
    torch.manual_seed(0)
    model = ActorCritic()
    return ProximalPolicy(model, torch.optim.Adam(model.parameters(), lr=1e-3))


def make_gradient_penalty() -> Training:
    torch.manual_seed(0)
    model = make_layers(32, 1)
    return GradientPenalty(model, torch.optim.Adam(model.parameters(), lr=1e-3))


def make_closure() -> Training:
    torch.manual_seed(0)
    model = make_layers(32, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=3)
    return Closure(model, optimizer)


@pytest.mark.promise("C6")
# `spans_passes`: no plan fits that moves nothing from one pass to the next.
@pytest.mark.parametrize(
    ("make", "share", "spans_passes"),
    [
        pytest.param(make_proximal_policy, 0.9, True, id="three losses at 90 %"),
        pytest.param(make_proximal_policy, 0.75, True, id="three losses at 75 %"),
        pytest.param(make_gradient_penalty, 0.9, False, id="gradient penalty at 90 %"),
        pytest.param(make_gradient_penalty, 0.7, True, id="gradient penalty at 70 %"),
        pytest.param(make_gradient_penalty, 0.55, True, id="gradient penalty at 55 %"),
        pytest.param(make_closure, 0.9, False, id="closures at 90 %"),
        pytest.param(make_closure, 0.65, False, id="closures at 65 %"),
    ],
)
def test_session_when_a_step_has_several_backward_passes_then_its_plan_holds(
    make: Callable[[], Training], share: float, spans_passes: bool
) -> None:
    in_use_bytes()  # what former tests have left behind goes now
    plain = train_plainly(make, STEPS)
    training = make()
    limit_bytes = int(plain.peak_bytes * share)
    with swapkit.budget(limit_bytes, training.model, training.optimizer) as session:
        log = train(session, training, STEPS)
        plan, trace = session.plan, session.trace
        assert plan is not None, session.explain()
        assert trace is not None
    assert log.stages[-1] == "stable"
    assert log.rescues_since(STEPS - SETTLED) == 0
    moved = [each for each in plan.decisions if each.action is not Action.KEEP]
    continued = [each for each in moved if trace.storages[each.storage].continues is not None]
    assert moved
    assert continued or not spans_passes
    assert training.outcome() == plain.outcome
