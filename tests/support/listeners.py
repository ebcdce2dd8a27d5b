"""A listener to torch's global hooks that notes what it hears."""

from __future__ import annotations

import threading

import torch
from torch import nn


class NotingListener:
    """Notes what it hears, with the thread."""

    may_bypass = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, object, int]] = []

    def _note(self, what: str, whose: object) -> None:
        self.heard.append((what, whose, threading.get_ident()))

    def enter(self, module: nn.Module) -> None:
        self._note("enter", module)

    def leave(self, module: nn.Module) -> None:
        self._note("leave", module)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note("before", optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note("after", optimizer)


def make_optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)
