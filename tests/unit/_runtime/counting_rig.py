"""A step counter that listens, and how many steps it ended."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swapkit._runtime.model.step_counter import StepCounter
from swapkit._runtime.model.tracker import ModuleTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TAG = 77


class Counted:
    """A counter that listens, and the steps it ended."""

    def __init__(
        self, model: nn.Module | None, *optimizers: torch.optim.Optimizer, is_here: bool = True
    ) -> None:
        self.ended = 0
        self.counter = StepCounter(
            model,
            optimizers,
            self.end,
            is_here=lambda: is_here,
            rebase=ModuleTracker().rebase,
            tag=TAG,
        )

    def end(self) -> None:
        self.ended += 1


@contextmanager
def counting() -> Iterator[Callable[..., Counted]]:
    """Give what makes counters, which listen until the end."""
    made: list[Counted] = []

    def make(*args: Any, **options: Any) -> Counted:
        counted = Counted(*args, **options)
        made.append(counted)
        counted.counter.start()
        return counted

    yield make
    for counted in made:
        counted.counter.stop()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)
