"""Operators of named modules are kept in a region, whatever is around the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute.watchers.exclusions import KeepInside, is_same


class Asks(nn.Module):
    """Asks about two operators where it runs."""

    def forward(self, policy: KeepInside) -> list[object]:
        aten = torch.ops.aten
        return [policy(None, each.default) for each in (aten.sin, aten.t)]


@pytest.mark.promise("B16")
def test_policy_when_a_module_runs_then_its_own_operators_are_kept_but_no_views() -> None:
    model = nn.Module()
    model.one, model.two = Asks(), Asks()
    policy = KeepInside(operators=(("one", "sin|t"),))
    tracker = get_runtime().tracker
    tracker.start("test")
    try:
        tracker.add_model(model)
        answers = model.one(policy), model.two(policy)
    finally:
        tracker.stop("test")
    other = CheckpointPolicy.PREFER_RECOMPUTE
    assert answers == ([CheckpointPolicy.MUST_SAVE, other], [other, other])


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("layers.0.mlp", "layers.0.mlp", True),
        ("layers.0.mlp", "module.layers.0.mlp", True),
        ("module.layers.0.mlp", "layers.0.mlp", True),
        ("layers.0.mlp", "layers.10.mlp", False),
        ("0.mlp", "layers.10.mlp", False),
        ("layers.0.mlp", "layers.0.mlp.act", False),
    ],
)
def test_names_when_seen_from_other_roots_then_one_ends_as_the_other(
    name: str, other: str, expected: bool
) -> None:
    assert is_same(name, other) is expected
