"""Steps of optimizers in the middle of backward passes, and where the session's steps end then."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.sessions import step_in_backward
from tests.unit._runtime.counting_rig import Counted, counting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def count() -> Iterator[Callable[..., Counted]]:
    with counting() as make:
        yield make


@pytest.mark.parametrize("are_given", [False, True])
def test_step_when_optimizers_step_in_backward_then_it_ends_with_the_pass(
    count: Any, are_given: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    ends: list[int] = []
    optimizers = step_in_backward(model, lambda: ends.append(counted.ended))
    counted = count(model, *(optimizers if are_given else ()))
    for step in range(3):
        model(torch.ones(3, 2)).sum().backward()
        assert counted.ended == step + 1
    assert ends == [0] * 4 + [1] * 4 + [2] * 4


class Nested(nn.Module):
    """Layers in torch's reentrant checkpoint, one region inside of the other."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def outer(x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x).tanh()
            inner: torch.Tensor = checkpoint(self.layers[1], x, use_reentrant=True)
            return inner.tanh()

        result: torch.Tensor = checkpoint(outer, x, use_reentrant=True)
        return result


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of the region inside
@pytest.mark.parametrize("head", [False, True])
def test_step_when_backward_runs_inside_of_backward_then_it_ends_with_the_outermost(
    count: Any, head: bool
) -> None:
    nested = Nested(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model = nn.Sequential(nested, nn.Linear(2, 1) if head else nn.Tanh())
    step_in_backward(model)
    counted = count(model)
    ends = []
    for step in range(3):
        x = torch.ones(3, 2, requires_grad=True)
        x.register_hook(lambda _: ends.append(counted.ended))  # last of the outer pass
        model(x).sum().backward()
        assert counted.ended == step + 1
    assert ends == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of the region inside
def test_step_when_a_pass_inside_raises_then_the_next_is_counted_again(count: Any) -> None:
    nested = Nested(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    step_in_backward(nested)
    counted = count(nested)
    is_failing = True

    def fail(_gradient: torch.Tensor) -> None:
        if is_failing:
            raise KeyError("in a hook")

    for expected in (0, 1):
        x = torch.ones(3, 2, requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(KeyError) if is_failing else nullcontext():
            nested(x).sum().backward()
        assert counted.ended == expected
        is_failing = False
