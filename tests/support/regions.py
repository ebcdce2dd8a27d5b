"""Models parts of which a user has computed again, in every way that there is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import swapkit
from tests.support import sessions
from tests.support.sessions import WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 3


class OneDropout(nn.Module):
    """Dropout by one operator, as on a GPU; on the CPU, torch's fills its mask in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, _ = torch.native_dropout(x, 0.1, True)
        return result


class Block(sessions.Block):
    """The same, but for its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = OneDropout()


class Counted(nn.Module):
    """Counts its calls, and has a batch norm that counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        return torch.add(x, self.norm(self.block(x)).tanh())


class UpAndDown(nn.Module):
    """Has a layer to more features, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)


class ChangesInPlace(UpAndDown):
    """Changes what it has made, and what that was made of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        hidden = up[:, :4] * 0.5
        once = hidden + 1
        hidden.add_(once)
        out: torch.Tensor = (
            x + self.down(up.sigmoid().exp()) * (hidden.sigmoid() * once.exp()).sum()
        )
        return out


class Numbers(UpAndDown):
    """Computes with numbers of Python's: torch wraps them in tensors, which modes never see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.tanh(self.up(x) * 0.5) / 3
        signs = torch.sub((up > 0).to(torch.int32) * 2, 1) * 0.25  # an integer tensor: a float one
        out: torch.Tensor = torch.add(x, self.down(2 - (up * signs).exp()), alpha=0.5)
        return out


class TwoParts(nn.Module):
    """Has two regions in its forward, and what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = torch.sigmoid(part_of(self.first, x) * 2)
        return torch.add(x, part_of(self.second, between))


@swapkit.checkpoint(save=["gelu"])
def part_of(block: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(block(x))


def _some(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """Return layers, every other one of which is a region, between others."""
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        layer = make()
        layers.append(swapkit.checkpoint(layer, **options) if index % 2 else layer)
        layers.append(nn.Tanh())
    return nn.Sequential(*layers)


def _nested() -> nn.Module:
    inner = [swapkit.checkpoint(Block(), save=["mm", "addmm"]) for _ in range(2)]
    middle = swapkit.checkpoint(nn.Sequential(Block(), *inner))
    return nn.Sequential(Block(), swapkit.checkpoint(nn.Sequential(middle, Block())), Block())


def _whole() -> nn.Module:
    return nn.Sequential(*[swapkit.checkpoint(Block()) for _ in range(LAYERS)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": _whole,
    "some": functools.partial(_some, Block),
    "saved": functools.partial(_some, Block, save=["matmul", "addmm"]),
    "statistics": functools.partial(_some, Counted),
    "numbers": functools.partial(_some, Numbers),
    "in_place": functools.partial(_some, ChangesInPlace),
    "two": lambda: nn.Sequential(TwoParts(), Block(), TwoParts()),
    "nested": _nested,
}
