"""Custom `autograd.Function`s, and what autograd does with what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tests.programs.registry import SIDE, Evict, gradients, leaf, program


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _, first = ctx.saved_tensors
        x, second = ctx.saved_tensors
        result: torch.Tensor = grad * (first + second) / 2 + x * 0
        return result


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = grad * x.cos()
        return result


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, None)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor:
        x, nothing = ctx.saved_tensors
        assert nothing is None
        first, second = grads
        assert second is None
        result: torch.Tensor = first * x.cos()
        return result


class ReturnsSaved(torch.autograd.Function):
    """The gradient is the saved tensor itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return weight, None


class BackwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.detach().tanh() @ x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            out = again.tanh() @ again
        result: torch.Tensor = torch.autograd.grad(out, again, grad)[0]
        return result


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return (x * factor).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        _, ctx.factor = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (output,) = ctx.saved_tensors
        return grad * output * ctx.factor, None


class MarksDirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = grad * x
        return result


@program("G10")
def saved_tensors_read_twice(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = ReadsTwice.apply(x * 0.1).sum()
    evict()
    return gradients(loss, x)


@program("G10")
def saved_tensor_read_before_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = (x * 0.5).exp()
    node: Any = y.grad_fn
    loss = y.sum()
    del y
    evict()
    seen = node._saved_result.clone()
    evict()
    return [seen, *gradients(loss, x)]


@program("G10", "G21")
def saved_tensor_held_beyond_its_graph(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = (x * 0.5).exp()
    node: Any = y.grad_fn
    loss = y.sum()
    del y
    evict()
    held = node._saved_result
    evict()
    grads = gradients(loss, x)
    del loss, node
    evict()
    torch.full((SIDE, SIDE), float("nan"))
    return [held.detach(), *grads]


@program()
def once_differentiable_function(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = Once.apply(x * 2).sum()
    evict()
    return gradients(loss, x)


@program()
def gradients_that_are_not_materialised(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first, second = TwoOutputs.apply(x * 2)
    loss = first.sum()
    del first, second
    evict()
    return gradients(loss, x)


@program("G21")
def gradient_that_is_the_saved_tensor(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    weight = torch.randn(SIDE, SIDE)
    loss = ReturnsSaved.apply(x, weight)
    del weight
    evict()
    (grad,) = gradients(loss, x, retain_graph=True)
    evict()
    (again,) = gradients(loss, x)
    del loss
    evict()
    garbage = torch.full((SIDE, SIDE), float("nan"))
    return [grad, again, garbage]


@program("G21")
def stolen_gradient_buffer(evict: Evict) -> list[torch.Tensor]:
    """`x.grad` is the buffer that backward returned, and the optimizer changes it in place."""
    x = leaf()
    weight = torch.randn(SIDE, SIDE)
    loss = ReturnsSaved.apply(x, weight * 2)
    evict()
    loss.backward()
    assert x.grad is not None
    x.grad.mul_(3)
    del loss
    evict()
    second = ReturnsSaved.apply(x, weight.exp())
    evict()
    second.backward()
    return [x.grad]


@program("G20")
def backward_inside_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = BackwardInBackward.apply((x * 0.1).sin()).exp().mul(1e-3).sum()
    evict()
    return gradients(loss, x)


@program("G20")
def deeply_nested_backwards(evict: Evict) -> list[torch.Tensor]:
    x = leaf(32, 32)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.save_for_backward(value)
            ctx.depth = depth
            return value.detach().sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (value,) = ctx.saved_tensors
            with torch.enable_grad():
                inner = value.detach().requires_grad_()
                out = Nested.apply(inner, ctx.depth - 1) if ctx.depth else inner.sin()
                evict()
            return torch.autograd.grad(out, inner, grad)[0], None

    loss = Nested.apply(x * 2, 5).sum()
    evict()
    return gradients(loss, x)


@program()
def function_with_setup_context(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y: Any = NewStyle.apply(x * 0.5, 0.1)
    loss = y.tanh().sum()
    del y
    evict()
    return gradients(loss, x)


@program()
def function_that_marks_its_input_dirty(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y: Any = MarksDirty.apply(x * 0.5)
    loss = y.tanh().sum()
    del y
    evict()
    return gradients(loss, x)


@program()
def double_backward_of_a_function(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y: Any = NewStyle.apply(x, 0.1)
    evict()
    (grad,) = gradients(y.square().sum(), x, create_graph=True)
    del y
    evict()
    return [grad, *gradients(grad.sin().sum(), x)]


@program(moves=False)
def attributes_beside_saved_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            ctx.kept = value  # not saved: autograd does not see it
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (value,) = ctx.saved_tensors
            result: torch.Tensor = grad * value + ctx.kept
            return result

    loss = Keeps.apply(x.sin()).sum()
    evict()
    return gradients(loss, x)


@program("G7", moves=False)
def outputs_saved_and_never_walked(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    kept = [(x * k).exp() for k in range(1, 4)]
    evict()
    values = [each.detach().clone() for each in kept]
    del kept
    evict()
    return values
