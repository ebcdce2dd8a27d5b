"""`torch.func` and `torch.autograd.functional`.

torch itself refuses the transforms of G19 while any saved-tensor hooks are active; swapkit's step
aside.
"""

from __future__ import annotations

import torch
from torch import func
from torch.autograd import functional

from tests.programs.registry import SIDE, Evict, gradients, leaf, program

REFUSED = "saved tensor hooks|torch.func"


def loss_of(value: torch.Tensor) -> torch.Tensor:
    return (value @ value).mul(0.1).tanh().exp().sum()


@program("G19", refusal=REFUSED)
def func_grad(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    before = (x @ x).tanh().exp().sum()
    evict()
    grad = func.grad(loss_of)(x.detach())
    return [grad, *gradients(before, x)]


@program("G19", refusal=REFUSED, moves=False)
def func_vjp(_evict: Evict) -> list[torch.Tensor]:
    out, pullback, *_ = func.vjp(torch.sin, torch.randn(SIDE, SIDE))
    return [out, *pullback(torch.ones(SIDE, SIDE))]


@program("G19", refusal=REFUSED, moves=False)
def func_jacrev(_evict: Evict) -> list[torch.Tensor]:
    return [func.jacrev(lambda v: (v * v).exp())(torch.randn(64))]


@program("G19", refusal=REFUSED, moves=False)
def func_hessian(_evict: Evict) -> list[torch.Tensor]:
    return [func.hessian(lambda v: v.pow(3).sum())(torch.randn(64))]


@program("G19", refusal=REFUSED, moves=False)
def func_per_sample_gradients(_evict: Evict) -> list[torch.Tensor]:
    weight = torch.randn(SIDE, SIDE)
    rows = torch.randn(16, SIDE)
    per_row = func.vmap(func.grad(lambda w, row: (w @ row).tanh().sum()), in_dims=(None, 0))
    return [per_row(weight, rows)]


@program("G19", moves=False)
def func_jvp_and_linearize(evict: Evict) -> list[torch.Tensor]:
    x = torch.randn(SIDE, SIDE)
    out, tangent, *_ = func.jvp(loss_of, (x,), (torch.ones_like(x),))
    evict()
    _, linear = func.linearize(loss_of, x)
    return [out, tangent, linear(torch.ones_like(x)), func.jacfwd(torch.sin)(x[0])]


@program("G19")
def vmap_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = torch.vmap(lambda row: (row * row).tanh().exp())(x * 2).sum()
    evict()
    return gradients(loss, x)


@program("G19")
def vmap_with_eviction_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def of_row(row: torch.Tensor) -> torch.Tensor:
        hidden = (row * 2).tanh()
        evict()
        return hidden.exp().sin()

    loss = torch.vmap(of_row)(x * 2).sum()
    evict()
    return gradients(loss, x)


@program("G19")
def functional_call(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(21)
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh())
    weights = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    loss = func.functional_call(model, weights, torch.randn(SIDE, SIDE)).exp().sum()
    evict()
    return gradients(loss, *weights.values())


@program()
def functional_jacobian_and_hessian(evict: Evict) -> list[torch.Tensor]:
    x = leaf(24, 24)
    loss = (x @ x).tanh().exp().sum()
    evict()
    rows = functional.jacobian(lambda v: (v * v).exp()[:2], x.detach())
    batched = functional.jacobian(lambda v: (v * v).exp()[:2], x.detach(), vectorize=True)
    second = functional.hessian(lambda v: v.pow(3).sum(), torch.arange(12.0))
    evict()
    return [rows, batched, second, *gradients(loss, x)]


@program()
def batched_gradients(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    out = (x * x).tanh().exp()[0]
    directions = torch.eye(SIDE)
    evict()
    return gradients(out, x, grad_outputs=directions, is_grads_batched=True)
