"""A model of equal layers and its training: enough saved tensors to move, in little time."""

from __future__ import annotations

import torch
from torch import nn

import swapkit

WIDTH = 64


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model in swapkit's pool, and its optimizer."""
    swapkit.install(device="cpu")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)])
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train so many steps."""
    for _ in range(steps):
        model(torch.ones(2048, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
