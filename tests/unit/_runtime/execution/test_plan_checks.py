"""Which plan fits which steps: signatures, and plans that are for something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from swapkit._runtime.execution.plan_compiler import (
    HEAVIER,
    check_fit,
    is_heavier,
    pace,
    sign,
)
from swapkit.errors import PlanMismatch
from swapkit.ir.plans import Action, Decision, Plan, Prediction
from swapkit.ir.traces import Kind, Storage, Trace

MODEL = nn.Sequential(nn.Linear(4, 4))
PLAN = Plan(
    decisions=(Decision(storage=1, action=Action.SWAP), Decision(storage=2, action=Action.KEEP)),
    budget_bytes=1000,
    prediction=Prediction(seconds=2.0, peak_bytes=900, stall_seconds=0.5),
    bound_seconds=1.5,
)


def saved_in(module: str) -> Trace:
    storages = (
        Storage(nbytes=100, kind=Kind.STATE, death=1),
        Storage(nbytes=50, birth=0, death=1, is_saved=True, module=module),
    )
    return Trace(operators=(), storages=storages, base_bytes=7)


def test_signature_when_shapes_kinds_or_mode_differ_then_another() -> None:
    model = nn.Linear(4, 4)
    batch = torch.ones(2, 4)
    usual = sign(model, ((batch,), {"labels": batch}))
    assert sign(model, ((torch.zeros(2, 4),), {"labels": batch})) == usual
    others = [
        sign(model, ((torch.ones(3, 4),), {"labels": batch})),
        sign(model, ((batch.double(),), {"labels": batch})),
        sign(model, ((batch.requires_grad_(),), {"labels": torch.ones(2, 4)})),
        sign(model, ((torch.ones(2, 4),), {})),
        sign(model, ((torch.ones(2, 4),), {"labels": True})),
        sign(model.eval(), ((torch.ones(2, 4),), {"labels": torch.ones(2, 4)})),
    ]
    assert len({usual, *others}) == 1 + len(others)


def test_signature_when_numbers_differ_then_the_same() -> None:
    """A step's number, or a temperature, says nothing of its shapes."""
    batch = torch.ones(2, 4)
    assert sign(MODEL, ((batch, 1, 0.5), {})) == sign(MODEL, ((batch, 2, 0.7), {}))


def test_signature_when_a_module_trains_unlike_the_model_then_another() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(), nn.Linear(4, 4)))
    usual = sign(model, ((), {}))
    found = set()
    for each in list(model.modules())[1:]:
        each.training = False
        found.add(sign(model, ((), {})))
        each.training = True
    assert len(found | {usual}) == 5
    assert sign(model, ((), {})) == usual


def test_signature_when_a_module_is_inside_of_itself_then_all_are_looked_at() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    usual = sign(model, ((), {}))
    model.append(model)
    assert sign(model, ((), {})) == usual
    model[0].training = False
    assert sign(model, ((), {})) != usual


def test_fit_when_plan_model_and_budget_belong_together_then_accepted() -> None:
    for module in ("", "0", "0.Made", "Sequential"):
        check_fit(saved_in(module), PLAN, MODEL, 1000)


@pytest.mark.parametrize(
    ("module", "model", "limit_bytes", "text"),
    [
        ("0", MODEL, 999, "more than 999 B"),
        ("0", None, 1000, "needs its model"),
        (
            "1.mlp",
            MODEL,
            1000,
            r"its module 1\.mlp saves tensors, but Sequential has no such module",
        ),
    ],
)
def test_fit_when_something_is_not_as_it_was_then_refused_with_the_reason(
    module: str, model: nn.Module | None, limit_bytes: int, text: str
) -> None:
    with pytest.raises(PlanMismatch, match=text):
        check_fit(saved_in(module), PLAN, model, limit_bytes)


def test_plan_when_steps_take_longer_then_prediction_and_bound_do() -> None:
    slower = pace(PLAN, 1.5)
    assert slower.prediction == replace(PLAN.prediction or Prediction(seconds=0, peak_bytes=0),
                                        seconds=3.0)  # fmt: skip
    assert slower.bound_seconds == 2.25
    assert slower.decisions == PLAN.decisions
    assert pace(PLAN, 1.0) is PLAN


def test_trace_when_its_step_began_then_base_and_what_was_there_were_in_use() -> None:
    assert saved_in("0").bytes_before == 107


def test_step_when_it_begins_with_more_than_a_share_of_the_limit_beyond_then_heavier() -> None:
    limit_bytes = 1 << 20
    most = 100 + int(limit_bytes * HEAVIER)
    assert not is_heavier(most, 100, limit_bytes)
    assert is_heavier(most + 1, 100, limit_bytes)
