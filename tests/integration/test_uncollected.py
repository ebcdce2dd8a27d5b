"""`explain()` names memory that steps made and that stays in use: a class of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._runtime.allocators.memory_holders import UNCOLLECTED_AGE
from swapkit._runtime.model import hook_bypass
from tests.support.sessions import make_training

if TYPE_CHECKING:
    from swapkit._runtime.session.session import Session

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


def test_memory_when_an_inner_module_keeps_more_each_step_then_error_and_report_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inner modules go unnamed while there is room, but not while a program keeps what it makes."""
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    training = make_training()
    kept: list[torch.Tensor] = []
    up = training.model[1].up  # type: ignore[index]
    up.register_forward_hook(lambda _module, _inputs, result: kept.append(result.detach() + 1))
    budget = swapkit.budget("24MiB", training.model, training.optimizer, policy="rescue")
    reports: list[str] = []

    def train(session: Session) -> None:
        while True:
            training.step()
            if session.stats.oom_rescues == 0:
                reports.append(session.explain())

    with budget as session, pytest.raises(torch.OutOfMemoryError) as caught:
        train(session)
    uncollected = reports[-1].partition("uncollected (")[2]
    for text in (uncollected, str(caught.value).partition("Largest holders")[2]):
        assert text.splitlines()[1].partition("made in ")[2].startswith("1"), text
