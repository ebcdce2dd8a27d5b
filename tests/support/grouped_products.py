"""A model of grouped matrix products whose kernel is the test's, and its training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    # Of the tensor in a list, which may be empty after it, and of weights.
    Product = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]

TOKENS, WIDTH, GROUPS, DEPTH = 96, 16, 3, 4
ENDS = [32, 40, TOKENS]


class GroupedProduct(torch.autograd.Function):
    """The operator with its gradients, as MindSpeed wraps it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return product([x], weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        begins = [0, *ENDS[:-1]]
        of_weight = [x[a:b].t() @ grad[a:b] for a, b in zip(begins, ENDS, strict=True)]
        back = ctx.product([grad.contiguous()], weight.transpose(1, 2).contiguous())
        return back, torch.stack(of_weight), None


class Experts(nn.Module):
    """Layers of experts, each two grouped products."""

    def __init__(self, product: Product, numbers: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(product, numbers) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """One of them."""

    def __init__(self, product: Product, numbers: torch.Generator) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.randn(GROUPS, WIDTH, WIDTH, generator=numbers) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operands = [x * 1.5]
        waves = operands[0].sin()  # from now on, backward keeps the operand
        factor = self.product(operands, self.weight)
        made: torch.Tensor = GroupedProduct.apply(x * 1.5, self.weight, self.product)
        return torch.tanh(made) * torch.sigmoid(made) + waves * factor + x


def train(
    product: Product, seed: int = 0, prepare: Callable[[nn.Module], object] = id
) -> list[str]:
    """Return losses and gradients of three steps, bit for bit."""
    numbers = torch.Generator().manual_seed(seed)
    model = Experts(product, numbers)
    prepare(model)
    results = []
    for _ in range(3):
        x = torch.randn(TOKENS, WIDTH, generator=numbers, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward()
        grads = [x.grad, *(each.grad for each in model.parameters())]
        results += [float(loss.detach()).hex()] + [bits_of(grad) for grad in grads]
        model.zero_grad()
    return results


def bits_of(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    return tensor.numpy().tobytes().hex()
