"""`explain()` names memory that steps made and that stays in use: a class of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime.allocators.memory_holders import UNCOLLECTED_AGE
from tests.support.sessions import make_training

if TYPE_CHECKING:
    import torch

STEPS = UNCOLLECTED_AGE + 4

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.promise("F15")]


def explain_after(*, keeps: bool) -> str:
    """Train some steps, and keep copies of the 128 KiB that a block returns if `keeps`."""
    training = make_training()
    kept: list[torch.Tensor] = []
    block = training.model[1]  # type: ignore[index]

    def keep(_module: object, _arguments: object, result: torch.Tensor) -> None:
        if keeps:
            kept.append(result.detach().clone())

    handle = block.register_forward_hook(keep)
    with swapkit.budget("1GiB", training.model, training.optimizer, policy="rescue") as session:
        for _ in range(STEPS):
            training.step()
        text = session.explain()
    handle.remove()
    return text


def test_explain_when_a_program_keeps_what_steps_made_then_it_is_named_with_its_bytes() -> None:
    text = explain_after(keeps=True)
    _, _, uncollected = text.partition("uncollected (")
    head, first, *_ = uncollected.splitlines()
    kept = STEPS - UNCOLLECTED_AGE  # without that of the first step, which may be of use
    assert f"{UNCOLLECTED_AGE} steps later or more): {kept * 128}.00 KiB" in head
    assert first.endswith(f"made in Sequential ({kept})")


def test_explain_when_nothing_is_kept_then_parameters_gradients_and_states_are_not_named() -> None:
    assert "uncollected" not in explain_after(keeps=False)
