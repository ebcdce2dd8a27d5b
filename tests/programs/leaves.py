"""Leaves with memory or attributes that change: autograd saves the leaves themselves."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.programs.registry import SIDE, Evict, gradients, leaf, program

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 5


class Product(torch.autograd.Function):
    """Saves a weight itself; `linear` saves a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight.t(), None


def frozen(*, is_parameter: bool) -> list[torch.Tensor]:
    """Return weights without gradients."""
    made = [torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(LAYERS)]
    return [nn.Parameter(each, requires_grad=False) if is_parameter else each for each in made]


def _call(bring: Callable[[int], None], number: int, _grad: torch.Tensor) -> None:
    bring(number)


def streamed(
    evict: Evict, weights: list[torch.Tensor], bring: Callable[[int], None]
) -> torch.Tensor:
    """Run layers; each shows its weight only while it runs, forward and backward."""
    hidden = leaf()
    first = hidden
    for number, weight in enumerate(weights):
        bring(number)
        hidden = Product.apply(hidden, weight).tanh()
        evict()
        hidden.register_hook(functools.partial(_call, bring, number))
    evict()
    (found,) = gradients(hidden.square().sum(), first)
    return found


def through_a_ring(evict: Evict, weights: list[torch.Tensor]) -> torch.Tensor:
    home = [each.detach().clone() for each in weights]
    ring, turns = [torch.empty(SIDE, SIDE) for _ in range(2)], itertools.count()

    def bring(number: int) -> None:
        staging = ring[next(turns) % len(ring)]
        staging.data.copy_(home[number])
        weights[number].data = staging

    return streamed(evict, weights, bring)


@program("G1")
def ring_of_staging_buffers(evict: Evict) -> list[torch.Tensor]:
    """Frozen weights take turns in two buffers, which are filled outside of autograd."""
    torch.manual_seed(60)
    kinds = [frozen(is_parameter=each) for each in (True, False)]
    return [through_a_ring(evict, weights) for weights in kinds]


@program("G1")
def streamed_weights(evict: Evict) -> list[torch.Tensor]:
    """Weights have no memory but while their layer runs."""
    torch.manual_seed(61)
    weights = frozen(is_parameter=True)
    home = [each.detach().clone() for each in weights]

    def bring(number: int) -> None:
        for other, weight in enumerate(weights):
            weight.data = home[number].clone() if other == number else torch.empty(0)

    return [streamed(evict, weights, bring), *home]


@program("G1")
def plain_tensor_that_is_pointed_elsewhere(evict: Evict) -> list[torch.Tensor]:
    """Autograd saves a leaf itself, so backward reads the memory that the leaf has then."""
    torch.manual_seed(62)
    x, scale = leaf(), torch.randn(SIDE, SIDE)
    loss = ((x * 2).sin() * scale).sum()
    evict()
    scale.data = torch.randn(SIDE, SIDE)
    evict()
    return [*gradients(loss, x), scale]


@program()
def weight_that_is_lent_in_between(evict: Evict) -> list[torch.Tensor]:
    """An average of the weight is shown between forward and backward, as for an evaluation."""
    torch.manual_seed(63)
    layer, x = nn.Linear(SIDE, SIDE), leaf()
    layer.weight.requires_grad_(False)
    loss = layer(layer((x * 1).tanh()).tanh()).square().sum()
    own, layer.weight.data = layer.weight.data, torch.randn(SIDE, SIDE)
    evict()
    with torch.no_grad():
        evaluated = layer(torch.ones(2, SIDE))
    layer.weight.data = own
    evict()
    return [*gradients(loss, x), evaluated]


class Packed(nn.Parameter):
    """A weight of two 4-bit numbers to the byte, which knows how to read them."""

    scale: torch.Tensor

    def numbers(self) -> torch.Tensor:
        low, high = self.data & 15, self.data >> 4
        found: torch.Tensor = (torch.cat([low, high]).float() - 8) * self.scale
        return found


class Attributes(torch.autograd.Function):
    """Reads attributes of saved weights, and writes some, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Packed, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, packed, weight)
        ctx.ids = id(packed), id(weight)
        result: torch.Tensor = x @ packed.numbers() @ weight
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, packed, weight = ctx.saved_tensors
        assert (id(packed), id(weight)) == ctx.ids
        assert weight.is_leaf
        weight.main_grad.addmm_((x @ packed.numbers()).t(), grad)
        weight.grad_added = True
        back: torch.Tensor = grad @ weight.t() @ packed.numbers().t()
        return back, None, None


@program()
def attributes_of_saved_weights(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(64)
    data = torch.randint(0, 255, (SIDE // 2, SIDE), dtype=torch.uint8)
    packed: Any = Packed(data, requires_grad=False)
    packed.scale = torch.rand(SIDE)
    weight: Any = nn.Parameter(torch.randn(SIDE, SIDE))
    weight.main_grad, weight.grad_added = torch.zeros(SIDE, SIDE), False
    x = leaf()
    loss = (Attributes.apply((x * 1).tanh(), packed, weight) / SIDE).sin().sum()
    evict()
    found = gradients(loss, x)
    assert weight.grad_added is True
    return [*found, weight.main_grad]


class Identity(torch.autograd.Function):
    """Expects a leaf that the program holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        assert mask.note == "held"
        return grad * mask, None


@program()
def leaves_that_the_program_holds(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(65)
    x, masks = leaf(), [(torch.rand(SIDE, SIDE) > 0.5).float() for _ in range(3)]
    hidden = x * 1
    for mask in masks:
        mask.note = "held"  # type: ignore[attr-defined]
        hidden = Identity.apply(hidden.tanh(), mask)
        evict()
    return gradients(hidden.sum(), x)
