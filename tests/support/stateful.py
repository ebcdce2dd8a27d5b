"""Models that change more than their parameters: statistics, observers, power iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from swapkit.ir.plans import Action, Decision, Plan
from swapkit.simulation.lowering import lower
from tests.support.sessions import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace

DEPTH = 3
CHANNELS = 8
IMAGE = (16, CHANNELS, 16, 16)
ROWS = (512, 64)
LATENT = 32


class MovingAverages(nn.Module):
    """Normalises by averages that it keeps itself, and counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.get_buffer("mean")
        centred = (x - mean.clone()).tanh() * self.weight
        if self.training:
            with torch.no_grad():
                mean.lerp_(x.mean(0), 0.1)
                self.get_buffer("calls").add_(1)
        return centred.sigmoid()


class FakeQuantised(nn.Module):
    """A layer with an observer of activations, as quantisation-aware training has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

        self.layer = nn.Linear(width, width)
        self.observer = FusedMovingAvgObsFakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantised: torch.Tensor = self.observer(self.layer(x))
        return quantised.tanh()


class _Kernel(torch.autograd.Function):
    """Fills memory in a way that torch does not see, as kernels in Triton do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        filled, added = torch.empty_like(x), torch.zeros_like(x)
        np.tanh(x.numpy(), out=filled.numpy())
        np.add(added.numpy(), x.numpy(), out=added.numpy())
        ctx.save_for_backward(filled, added)
        return filled + added

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        filled, added = ctx.saved_tensors
        scaled: torch.Tensor = grads[0] * (2 - filled * filled + 0 * added)
        return scaled


class Kernels(nn.Module):
    """A module around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Kernel.apply(x)
        return made


class OddlyNormalised(nn.Module):
    """Uses running statistics as they are before and after the call that updates them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.norm.running_mean
        assert mean is not None
        before = torch.exp(torch.sub(x, mean).mul(0.1))
        after = self.norm(before)
        still = nn.functional.batch_norm(x, mean, self.norm.running_var)
        return torch.sigmoid(torch.sub(after, mean)) * still.tanh()


def _images(norm: Callable[[], nn.Module]) -> nn.Module:
    """Return the layers between which the issue with running statistics was found."""
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            norm(),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.Tanh(),
        ]
    return nn.Sequential(*layers)


def _rows(make: Callable[[], nn.Module]) -> nn.Module:
    width = ROWS[-1]
    layers = [each for _ in range(DEPTH) for each in (nn.Linear(width, width), make(), nn.GELU())]
    return nn.Sequential(*layers)


def _spectral(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return _rows(lambda: nn.Sequential(normalise(nn.Linear(ROWS[-1], ROWS[-1])), nn.Tanh()))


def _generator() -> nn.Module:
    """Return a generator of images from noise."""
    return nn.Sequential(
        nn.Linear(LATENT, 16 * 4 * 4),
        nn.BatchNorm1d(16 * 4 * 4),
        nn.ReLU(),
        nn.Unflatten(1, (16, 4, 4)),
        nn.ConvTranspose2d(16, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 3, 3, padding=1),
        nn.Tanh(),
    )


def _old_spectral_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.spectral_norm(layer)


@dataclass(frozen=True, slots=True)
class Stateful:
    """A model and the shape of its batches."""

    make: Callable[[], nn.Module]
    batch: tuple[int, ...]


MODELS: dict[str, Stateful] = {
    "batch norm 2d": Stateful(lambda: _images(lambda: nn.BatchNorm2d(CHANNELS)), IMAGE),
    "batch norm 2d, cumulative": Stateful(
        lambda: _images(lambda: nn.BatchNorm2d(CHANNELS, momentum=None)), IMAGE
    ),
    "batch norm 2d, no statistics": Stateful(
        lambda: _images(lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False)), IMAGE
    ),
    "batch norm 2d, in place after": Stateful(
        lambda: _images(lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True))),
        IMAGE,
    ),
    "batch norm 1d": Stateful(lambda: _rows(lambda: nn.BatchNorm1d(ROWS[-1])), ROWS),
    "batch norm 1d, cumulative": Stateful(
        lambda: _rows(lambda: nn.BatchNorm1d(ROWS[-1], momentum=None)), ROWS
    ),
    "synchronised batch norm, one rank": Stateful(
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
            _images(lambda: nn.BatchNorm2d(CHANNELS))
        ).train(),
        IMAGE,
    ),
    "instance norm": Stateful(
        lambda: _images(lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)),
        IMAGE,
    ),
    "spectral norm": Stateful(lambda: _spectral(parametrizations.spectral_norm), ROWS),
    "spectral norm by hooks": Stateful(lambda: _spectral(_old_spectral_norm), ROWS),
    "moving averages of its own": Stateful(lambda: _rows(lambda: MovingAverages(ROWS[-1])), ROWS),
    "statistics read in between": Stateful(lambda: _rows(lambda: OddlyNormalised(ROWS[-1])), ROWS),
    "fake quantisation": Stateful(lambda: _rows(lambda: FakeQuantised(ROWS[-1])), ROWS),
    "kernel of its own": Stateful(lambda: _rows(Kernels), ROWS),
    "random slopes": Stateful(lambda: _rows(nn.RReLU), ROWS),
    "generator": Stateful(_generator, (64, LATENT)),
}


@dataclass
class StatefulTraining(Training):
    """Training of one of them."""

    batch: tuple[int, ...] = ()

    def forward(self) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.model(torch.randn(self.batch)).square().mean()
        return loss


def make_stateful(name: str) -> StatefulTraining:
    """Return the training of a model, from the same numbers each time."""
    model = MODELS[name]
    torch.manual_seed(0)
    made = model.make()
    return StatefulTraining(made, torch.optim.AdamW(made.parameters(), 1e-3), batch=model.batch)


class RecomputeAll:
    """A policy: compute again whatever a plan may compute again."""

    def __init__(self) -> None:
        self.recomputed = 0  # storages, in the latest plan

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return what is computed again; the budget has to have room for it."""
        problem = lower(trace, least_bytes=1)
        storages = problem.item_storages[problem.can_recompute].tolist()
        self.recomputed = len(storages)
        decisions = [Decision(storage=each, action=Action.RECOMPUTE) for each in storages]
        return Plan(
            decisions=tuple(sorted(decisions, key=lambda each: each.storage)),
            budget_bytes=machine.budget_bytes,
            policy="all",
            signature=trace.signature,
        )
