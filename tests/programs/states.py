"""Programs that change more than parameters: every buffer has to come out as in plain training."""

from __future__ import annotations

import functools

import torch

from tests.programs.registry import Evict, Program, gradients, program
from tests.support.stateful import MODELS, Stateful

STEPS = 2


def _train(model: Stateful, evict: Evict) -> list[torch.Tensor]:
    """Return the gradients of some steps, and the whole state after them."""
    made = model.make()
    results = []
    for _ in range(STEPS):
        loss = made(torch.randn(model.batch)).square().mean()
        evict()
        results += gradients(loss, *made.parameters())
    return [*results, *made.state_dict().values()]


def _name(name: str) -> str:
    return "trains_" + name.replace(",", "").replace(" ", "_")


def _register() -> None:
    for name, model in MODELS.items():
        body: Program = functools.partial(_train, model)
        vars(body)["__name__"] = _name(name)
        program(cpu_only=True)(body)


_register()
