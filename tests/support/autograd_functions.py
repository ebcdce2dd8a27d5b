"""Functions of autograd that do, each, something else that such a function may do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from swapkit import adapt_mem_func_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    Apply = Callable[..., Any]

SIDE = 128
CALLS: Counter[str] = Counter()  # of forward, by class


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors, None, defaults; a saved intermediate."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: float = 0.5, bias: Any = None, name: str = "x"
    ) -> Any:
        CALLS["Scaled"] += 1
        assert name == "x"
        middle = (x * factor).exp()
        ctx.save_for_backward(middle, bias)
        ctx.factor = factor
        return middle if bias is None else middle + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        middle, bias = ctx.saved_tensors
        return grad * middle * ctx.factor, None, None if bias is None else grad, None


class Largest(torch.autograd.Function):
    """Several outputs, one of them not differentiable; a saved output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> Any:
        CALLS["Largest"] += 1
        values, indices = x.topk(count, 1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _none: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=grad.dtype).scatter(1, indices, grad), None


class Product(torch.autograd.Function):
    """Saves what `needs_input_grad` says, and differentiates twice."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        CALLS["Product"] += 1
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad * b, grad * a if ctx.needs_input_grad[1] else None


class Parted(torch.autograd.Function):
    """Gradients that are not materialised."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        CALLS["Parted"] += 1
        ctx.set_materialize_grads(False)
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(sine, cosine)
        return sine, cosine

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        sine, cosine = ctx.saved_tensors
        CALLS["none"] += second is None
        parts = [(first, cosine), (second, -sine)]
        known = [grad * part for grad, part in parts if grad is not None]
        return sum(known) if known else None


class Cube(torch.autograd.Function):
    """Written in the new style, with a rule for vmap; saves input and output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, power: int) -> Any:
        CALLS["Cube"] += 1
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, output = ctx.saved_tensors
        return grad * ctx.power * output / x, None


class Clamped(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        CALLS["Clamped"] += 1
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


class Once(torch.autograd.Function):
    """Differentiable once, with attributes; reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> Any:
        CALLS["Once"] += 1
        ctx.save_for_backward(x, *others)
        ctx.count, ctx.sizes = len(others), [tuple(other.shape) for other in others]
        return sum((x * other for other in others), x.tanh())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *others = ctx.saved_tensors
        again, *_ = ctx.saved_tensors
        assert ctx.sizes == [tuple(other.shape) for other in others]
        own = grad * (1 - again.tanh() ** 2) + sum(grad * other for other in others)
        return own, *(grad * x for _ in others)


class Dropped(torch.autograd.Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        CALLS["Dropped"] += 1
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Case(NamedTuple):
    """A function, and what it is applied to.

    `again`: it differentiates twice; `dirty`: it cannot be run again.
    """

    function: type[torch.autograd.Function]
    call: Callable[[Apply, Any, torch.Tensor, torch.Tensor], Any]
    checks: bool = True
    again: bool = False
    dirty: bool = False


CASES = [
    Case(Scaled, lambda apply, fn, x, y: apply(fn, x, 0.25, y)),
    Case(Largest, lambda apply, fn, x, y: apply(fn, x * y, 2)[0], again=True),
    Case(Product, lambda apply, fn, x, y: apply(fn, x.exp(), y.tanh()), again=True),
    Case(Parted, lambda apply, fn, x, y: apply(fn, x * y)[0], again=True),
    Case(Cube, lambda apply, fn, x, y: apply(fn, x.exp() + y * y, 3), again=True),
    Case(Clamped, lambda apply, fn, x, y: apply(fn, x * y) * y, again=True, dirty=True),
    Case(Once, lambda apply, fn, x, y: apply(fn, x.sin(), y.cos(), x * y)),
    Case(Dropped, lambda apply, fn, x, y: apply(fn, x * y), checks=False),
]


# ---- in a model ----------------------------------------------------------------------------------


class PipeExpert(torch.autograd.Function):
    """An expert's layer that is differentiated by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        CALLS["PipeExpert"] += 1
        hidden = x @ weight
        active = hidden.relu()
        ctx.save_for_backward(x, weight, hidden)
        return active

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, hidden = ctx.saved_tensors
        grad = grad * (hidden > 0)
        return grad @ weight.t(), x.t() @ grad


class Mixture(nn.Module):
    """A layer with an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE) / SIDE)

    def forward(self, x: torch.Tensor) -> Any:
        return adapt_mem_func_wrapper(PipeExpert, x, self.weight)


class Layer(nn.Module):
    """A layer of a model with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = Mixture()
        self.norm = nn.LayerNorm(SIDE)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.moe(self.norm(x))
