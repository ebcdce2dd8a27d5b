"""`swapkit.integrations.accelerate.budget`: all that an accelerator prepared, to the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument
from tests.integrations.support import (
    QUIET,
    Outcome,
    assert_same_within,
    measure,
    needs,
    read_scalars,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = [needs("accelerate"), QUIET, pytest.mark.usefixtures("installation")]
WIDTH, ROWS = 128, 512


def make_part() -> torch.nn.Module:
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1)) for _ in range(4)
    ]
    return torch.nn.Sequential(*blocks)


def train(
    open_session: Callable[[Any, list[Any], list[Any]], AbstractContextManager[Any]],
    *,
    parts: int = 1,
    **options: Any,
) -> tuple[Outcome, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    sessions: list[Any] = []

    def run() -> tuple[Any, Any, list[float]]:
        AcceleratorState._reset_state(reset_partial_state=True)  # one process has one precision
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        models: list[Any] = [make_part() for _ in range(parts)]
        optimizers: list[Any] = [torch.optim.AdamW(each.parameters()) for each in models]
        models = [accelerator.prepare(each) for each in models]
        optimizers = [accelerator.prepare(each) for each in optimizers]
        losses = []
        with open_session(accelerator, models, optimizers) as session:
            sessions.append(session)
            for step in range(12):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
                with accelerator.accumulate(*models):
                    y = x
                    for model in models:
                        y = torch.tanh(model(y))
                    loss = (y - x).square().mean()
                    accelerator.backward(loss)
                    losses.append(float(loss.detach()))
                    del loss, y
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        accelerator.end_training()
        return torch.nn.ModuleList(models), [each.optimizer for each in optimizers], losses

    return measure(run), sessions[0]


def plainly(*_: Any) -> AbstractContextManager[Any]:
    import contextlib

    return contextlib.nullcontext()


def within(limit: int, **options: Any) -> Callable[..., AbstractContextManager[Any]]:
    from swapkit.integrations.accelerate import budget

    return lambda accelerator, *_: budget(limit, accelerator, **options)


@pytest.mark.promise("A3")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_when_trained_in_a_budget_then_the_same_bits(parts: int, precision: str) -> None:
    plain, _ = train(plainly, parts=parts, mixed_precision=precision)
    limit = int(0.85 * plain.peak_bytes)
    found, session = train(within(limit), parts=parts, mixed_precision=precision)
    assert_same_within(found, plain, session)
    assert session.stats.steps == 6


def test_prepared_objects_when_given_to_the_plain_budget_then_the_same_bits() -> None:
    plain, _ = train(plainly)
    limit = int(0.85 * plain.peak_bytes)
    found, session = train(lambda _, models, own: swapkit.budget(limit, models[0], own))
    assert_same_within(found, plain, session)


@needs("tensorboard")
def test_budget_when_it_logs_then_metrics_reach_the_trackers(tmp_path: Path) -> None:
    from swapkit.integrations.accelerate import budget

    steps: list[int] = []

    def open_session(accelerator: Any, *_: Any) -> AbstractContextManager[Any]:
        accelerator.init_trackers("runs")
        return budget(
            "1GiB", accelerator, log_every=2, on_step=lambda each: steps.append(each.stats.steps)
        )

    train(open_session, log_with="tensorboard", project_dir=str(tmp_path))
    assert read_scalars(tmp_path)["swapkit/steps"] == [2.0, 4.0, 6.0]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_budget_when_nothing_was_prepared_then_refused() -> None:
    from accelerate import Accelerator

    from swapkit.integrations.accelerate import budget

    with pytest.raises(InvalidArgument, match="has prepared no model"):
        budget("1GiB", Accelerator(cpu=True))
