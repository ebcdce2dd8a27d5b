"""Programs for sessions to train, and what there is to compare: losses, gradients, states."""

from __future__ import annotations

import gc
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import swapkit
from swapkit._native.pool import Pool
from swapkit._runtime.allocators.installation import require_installation
from swapkit.ir.machines import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swapkit._runtime.saved.device import Limits
    from swapkit._runtime.session.session import Session

WIDTH = 64
TOKENS = 512
LAYERS = 5


def steady_machine_like(_device: object, limits: Limits) -> Machine:
    """Return what a session may plan for instead of what it would measure."""
    return Machine(
        budget_bytes=limits.budget_bytes,
        out_bytes_per_second=1e9,
        in_bytes_per_second=1e9,
        host_bytes=limits.host_bytes,
    )


class Block(nn.Module):
    """Attention and a feed-forward layer, with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout: nn.Module = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(0, 1)[None]
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed[0].transpose(0, 1).flatten(1)
        mixed = self.dropout(self.down(nn.functional.gelu(self.up(x))))
        return torch.add(x, mixed)


def make_model() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


@dataclass
class Training:
    """A model with its optimizer, and what came of each step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    tokens: int = TOKENS
    microbatches: int = 1
    steps_done: int = 0
    results: list[str] = field(default_factory=list)

    def forward(self) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.model(torch.randn(self.tokens, WIDTH)).square().mean()
        return loss

    def step(self) -> None:
        """Train one step."""
        torch.manual_seed(self.steps_done)
        for _ in range(self.microbatches):
            loss = self.forward()
            loss.backward()
            self.results.append(float(loss.detach()).hex())
            del loss
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        self.results.append(digest(gradients))
        del gradients
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        self.steps_done += 1

    def outcome(self) -> list[str]:
        """Return what came of each step, the whole state, and the next random number."""
        tensors = [*self.model.state_dict().values()]
        if self.optimizer is not None:
            for state in self.optimizer.state_dict()["state"].values():
                tensors += _tensors_in(list(state.values()))
        state = [digest([tensor]) for tensor in tensors]
        return [*self.results, *state, digest([torch.get_rng_state()])]


@dataclass
class CustomTraining(Training):
    """A program with another kind of step: `loss`."""

    def step(self) -> None:
        torch.manual_seed(self.steps_done)
        self.steps_done += 1
        self.results.append(self.loss().hex())

    def loss(self) -> float:
        """Train one step; return its loss."""
        raise NotImplementedError


def _tensors_in(values: list[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += _tensors_in(value)
    return found


def digest(tensors: Iterable[torch.Tensor]) -> str:
    content = b"".join(each.detach().contiguous().numpy().tobytes() for each in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def make_training(make: Callable[[], nn.Module] = make_model) -> Training:
    """Return a program that starts from the same numbers each time."""
    gc.collect()  # former ones would count
    torch.manual_seed(0)
    model = make()
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def in_use_bytes() -> int:
    gc.collect()
    return swapkit.memory_stats()["allocated_bytes.all.current"]


@dataclass(frozen=True)
class Plain:
    """Training without a budget."""

    outcome: list[str]
    peak_bytes: int
    between_bytes: int  # in use between two steps

    def budget(self, share: float) -> int:
        """Return the budget that leaves a share of what steps take beside what stays."""
        return int(self.between_bytes + share * (self.peak_bytes - self.between_bytes))


def nothing(_training: Training, _step: int) -> None:
    """Every step is as the one before."""


def train_plainly(
    make: Callable[[], Training], steps: int, before: Callable[[Training, int], object] = nothing
) -> Plain:
    """Train without a budget."""
    training = make()
    swapkit.reset_peak_memory_stats()
    for step in range(steps):
        before(training, step)
        training.step()
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    return Plain(training.outcome(), peak_bytes, in_use_bytes())


@dataclass
class Log:
    """What a session was like after each of its steps."""

    session: Session
    stages: list[str] = field(default_factory=list)
    rescues: list[int] = field(default_factory=list)  # so far
    replans: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)  # the pool's peak

    def note(self) -> None:
        stats = self.session.stats
        self.stages.append(self.session.stage)
        self.rescues.append(stats.oom_rescues)
        self.replans.append(stats.replans)
        self.reserved_bytes.append(swapkit.memory_stats()["reserved_bytes.all.peak"])

    def rescues_since(self, step: int) -> int:
        return self.rescues[-1] - self.rescues[step]


def train(
    session: Session,
    training: Training,
    steps: int,
    before: Callable[[Training, int], object] = nothing,
) -> Log:
    """Train in a session that was entered; the budget has to hold."""
    log = Log(session)
    swapkit.reset_peak_memory_stats()
    for step in range(steps):
        before(training, step)
        training.step()
        if training.optimizer is None:
            session.mark_step()
        log.note()
    assert max(log.reserved_bytes) <= session.limit_bytes
    assert 0 < session.stats.peak_bytes <= session.limit_bytes
    return log


def train_both(
    make: Callable[[], Training],
    share: float,
    steps: int,
    before: Callable[[Training, int], object] = nothing,
    **options: Any,
) -> Log:
    """Train without a budget, and with a share of the memory that took: to the same bits."""
    plain = train_plainly(make, steps, before)
    training = make()
    limit_bytes = plain.budget(share)
    with swapkit.budget(limit_bytes, training.model, training.optimizer, **options) as session:
        log = train(session, training, steps, before)
    assert training.outcome() == plain.outcome
    pool = require_installation().pool
    assert isinstance(pool, Pool)
    pool.check()
    return log


def settle(session: Session, training: Training, within: int) -> int:
    """Train until the session is stable; return how many steps that took."""
    for done in range(1, within + 1):
        training.step()
        if session.stage == "stable":
            return done
    raise AssertionError(f"at {session.stage} after {within} steps: {session.explain()}")


def step_in_backward(
    model: nn.Module, after: Callable[[], object] = lambda: None
) -> list[torch.optim.Optimizer]:
    """Give each parameter an optimizer that steps as soon as its gradient is there; return them.

    `after`: is called after each of their steps, in backward.
    """
    optimizers: list[torch.optim.Optimizer] = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizers.append(optimizer)

        def update(parameter: torch.Tensor, own: torch.optim.Optimizer = optimizer) -> None:
            own.step()
            parameter.grad = None
            after()

        parameter.register_post_accumulate_grad_hook(update)
    return optimizers
