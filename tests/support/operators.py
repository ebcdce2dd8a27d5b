"""What tests of chosen operators share: models of one function, and how they are chosen for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.user_choices.wrapping import carry_marks, make_part
from swapkit.registry import Choice, Recompute, Source, Swap
from tests.conformance.modes import settle
from tests.programs import leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.registry import What

Body: TypeAlias = "Callable[..., Any]"

OFTEN = r"mul|mm|exp|native_dropout|tanh|add|div"
HOW: dict[str, dict[str, What]] = {
    "recomputed": {".*": Recompute()},
    "mixed": {".*": Swap(), OFTEN: Recompute()},
}


def rows_of(chosen: dict[str, What]) -> tuple[Choice, ...]:
    """Return one row for each pattern of operators."""
    return tuple(
        Choice(source=Source.CONFIGURATION, what=what, operator=name)
        for name, what in chosen.items()
    )


def choose(module: nn.Module, chosen: dict[str, What], model: nn.Module | None = None) -> nn.Module:
    """Choose for operators of a module of a model."""
    make_part(module).add(*rows_of(chosen))
    carry_marks(model or module)
    return module


def recomputed() -> int:
    """Return how often an operator or a region was computed again."""
    return get_runtime().current_swapper().counters().recomputed


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = self.body(*args, **kwargs)
        return made


def train(model: nn.Module, *shapes: int) -> list[torch.Tensor]:
    """Run a model forward and backward; return whatever must not depend on choices."""
    torch.manual_seed(3)
    x, w = leaf(*shapes), leaf(*shapes)
    loss = model(x, w).float().sum()
    settle()
    grads = torch.autograd.grad(loss, [x, w, *model.parameters()])
    return [loss.detach(), *grads, torch.rand(3)]


def hidden_layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return what several kinds of operators make."""
    return ((x @ w).mul(0.1).exp() * w).tanh()
