"""Shallow copies of modules with choices run themselves, not what they are copies of."""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.user_choices.part import changes
from tests.integration.test_session_objects import CHOICES, choose, make_plain_model

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("installation")


def halve(model: nn.Module, copy_of: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a shallow copy, with shallow copies of the modules inside and half their weights."""
    twin = copy_of(model)
    vars(twin)["_modules"] = {name: halve(each, copy_of) for name, each in model.named_children()}
    vars(twin)["_parameters"] = {
        name: nn.Parameter(each.detach() / 2)
        for name, each in model.named_parameters(recurse=False)
    }
    return twin


@pytest.mark.parametrize(
    "copy_of", [copy.copy, nn.Module._replicate_for_data_parallel], ids=["copy", "replica"]
)
@pytest.mark.parametrize("name", CHOICES)
def test_model_with_choices_when_copied_shallowly_then_the_copy_runs_itself(
    name: str, copy_of: Callable[[nn.Module], nn.Module]
) -> None:
    x = torch.ones(2, 8)
    plain, model = make_plain_model(), choose(name)
    expected, halved = plain(x), halve(plain, copy_of)(x)
    twin = halve(model, copy_of)
    assert torch.equal(twin(x), halved)
    assert torch.equal(model(x), expected)
    assert torch.equal(twin.forward(x), halved)
    assert len(swapkit.choices(twin)) == len(swapkit.choices(model))
    del model
    assert torch.equal(twin(x), halved)


@pytest.mark.filterwarnings("ignore:The .grad:UserWarning")
@pytest.mark.parametrize("name", CHOICES)
def test_model_with_choices_when_copied_shallowly_and_compiled_then_the_copy_runs_itself(
    name: str,
) -> None:
    x = torch.ones(2, 8)
    expected = halve(make_plain_model(), copy.copy)(x)
    model = choose(name)
    twin = halve(model, copy.copy)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(twin, backend="eager")(x), expected)


def test_copy_when_its_class_has_a_call_of_its_own_then_the_copy_runs_itself() -> None:
    class Scaled(nn.Linear):
        def _call_impl(self, *args: object, **kwargs: object) -> torch.Tensor:
            result: torch.Tensor = self.forward(*args, **kwargs)  # type: ignore[arg-type]
            return result

    module = swapkit.checkpoint(Scaled(8, 8))
    twin = copy.copy(module)
    vars(twin)["_parameters"] = dict.fromkeys(module._parameters)
    twin.weight = nn.Parameter(module.weight.detach() / 2)
    x = torch.ones(2, 8)
    assert torch.equal(twin(x), nn.functional.linear(x, twin.weight))


def test_copy_when_called_then_no_choice_has_changed() -> None:
    twin = copy.copy(swapkit.checkpoint(nn.Linear(8, 8)))
    before = changes()
    twin(torch.ones(2, 8))
    assert changes() == before


def test_copy_when_the_user_has_replaced_forward_then_that_is_bound_as_it_was() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    module = Scaled(2.0)
    module.forward = types.MethodType(Scaled.forward, module)  # type: ignore[method-assign]
    twin = copy.copy(swapkit.checkpoint(module))
    twin.scale = 3.0
    assert twin(torch.ones(1)).item() == 2.0
