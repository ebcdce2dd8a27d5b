"""Programs that are legal in plain autograd, for tests that run them under a budget.

Each program calls `evict()` where a training step could run out of memory; it returns the tensors
whose bits must not depend on what `evict` does.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

Evict: TypeAlias = Callable[[], object]
Program: TypeAlias = Callable[[Evict], list[torch.Tensor]]

SIDE = 96  # 36 KiB a matrix: above the least size that is moved

PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(shape or (SIDE, SIDE)), dtype=dtype, requires_grad=True)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, leaves, **options))


@program
def chain(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).exp().sin().tanh().sum()
    evict()
    return [loss, *gradients(loss, x)]


@program
def two_graphs_then_two_backwards(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first = (x @ x).tanh().sum()
    evict()
    second = (x @ x.t()).sigmoid().sum()
    evict()
    return [*gradients(first, x), *gradients(second, x)]


@program
def one_forward_one_backward_pipeline(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    losses = [((x * (i + 1)) @ x).tanh().sum() for i in range(2)]
    evict()
    grads = gradients(losses.pop(0), x)
    losses.append((x @ x).cos().exp().sum())
    evict()
    for loss in losses:
        grads += gradients(loss, x)
    return grads


@program
def backward_twice_with_retain_graph(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    evict()
    first = gradients(loss, x, retain_graph=True)
    evict()
    return first + gradients(loss, x)


@program
def branch_without_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    unused = hidden.exp().sin()
    evict()
    loss = hidden.cos().sum()
    del unused, hidden
    evict()
    return gradients(loss, x)


@program
def double_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().pow(3).sum()
    evict()
    (grad,) = gradients(loss, x, create_graph=True)
    evict()
    return [grad.detach(), *gradients(grad.square().sum(), x)]


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


@program
def saved_tensors_read_twice(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = ReadsTwice.apply(x * 0.1).sum()
    evict()
    return gradients(loss, x)


@program
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


@program
def views_of_one_storage(evict: Evict) -> list[torch.Tensor]:
    x = leaf(4 * SIDE, SIDE)
    hidden = x * 1.5
    q, k, v, rest = hidden.chunk(4)
    strided = hidden[1::2, ::3]
    loss = (q @ k.t()).softmax(-1).matmul(v).sum() + (rest * rest.t()).sum()
    loss = loss + strided.square().sum()
    del hidden, q, k, v, rest, strided
    evict()
    return gradients(loss, x)


@program
def expanded_and_offset(evict: Evict) -> list[torch.Tensor]:
    x = leaf(SIDE * SIDE)
    base = x * 2
    row = base[SIDE:].as_strided((SIDE, SIDE), (0, 1), SIDE // 2)
    loss = (row * row.sin()).sum() + base.expand(3, -1).exp().mul(1e-3).sum()
    del base, row
    evict()
    return gradients(loss, x)


@program
def complex_conjugate_and_negative(evict: Evict) -> list[torch.Tensor]:
    x = leaf(dtype=torch.complex64)
    y = x * (1 + 2j)
    loss = (y.conj() @ y).abs().sum() + (y.conj().imag * y.real).sum()
    del y
    evict()
    return gradients(loss, x)


@program
def channels_last_convolution(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(1)
    conv = torch.nn.Conv2d(8, 8, 3)
    x = leaf(2, 8, 24, 24)
    loss = conv(x.to(memory_format=torch.channels_last) * 1).relu().square().sum()
    evict()
    return gradients(loss, x, *conv.parameters())


@program
def other_dtypes(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    grads = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loss = (x.to(dtype) * 0.5).exp().masked_fill(x > 1, 0).float().sum()
        evict()
        grads += gradients(loss, x)
    return grads


@program
def integer_and_boolean_indices(evict: Evict) -> list[torch.Tensor]:
    x = leaf(SIDE * 8, SIDE)
    index = torch.randint(0, SIDE * 8, (SIDE * SIDE,)) * 1
    loss = x.index_select(0, index).tanh().sum() + x[x > 0].square().sum()
    del index
    evict()
    return gradients(loss, x)


@program
def zero_size(evict: Evict) -> list[torch.Tensor]:
    x = leaf(0, SIDE)
    loss = (x.exp() * x).sum()
    evict()
    return gradients(loss, x)


@program
def sparse_saved_tensor(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    sparse = torch.eye(SIDE).to_sparse()
    loss = torch.sparse.mm(sparse, (x * 2)).exp().sum()
    evict()
    return gradients(loss, x)


@program
def checkpoint_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def block(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((value @ value.t()).tanh().exp(), 0.3)

    hidden = checkpoint(block, x * 0.1, use_reentrant=False)
    hidden = checkpoint(
        lambda v: checkpoint(block, v, use_reentrant=False), hidden, use_reentrant=False
    )
    loss = hidden.sum()
    del hidden
    evict()
    return gradients(loss, x)


@program
def reentrant_checkpoint_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = checkpoint(lambda v: (v @ v).tanh().exp(), x * 0.1, use_reentrant=True).sum()
    evict()
    loss.backward()
    assert x.grad is not None
    return [x.grad]


@program
def autocast(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.GELU(), torch.nn.Linear(SIDE, 8)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(64, SIDE)).float().square().sum()
    evict()
    return gradients(loss, *model.parameters())


@program
def in_place_on_tensors_that_are_not_saved(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 3
    y.add_(1).mul_(2)
    z = y.exp()
    y.zero_()  # exp saves its result, not its input
    loss = z.sum()
    del z
    evict()
    return gradients(loss, x)


@program
def backward_on_a_fresh_thread(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    evict()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None
    return [x.grad]


@program
def exception_in_the_middle_of_forward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with contextlib.suppress(ZeroDivisionError):
        y = (x @ x).tanh()
        evict()
        y.exp().mul(1 / int(x.shape[0] == 0)).sum()
    loss = (x @ x).sin().sum()
    evict()
    return gradients(loss, x)


@program
def accumulated_gradients(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh()] * 3)
    for _ in range(3):
        loss = model(torch.randn(SIDE, SIDE)).square().mean()
        evict()
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad for grad in grads if grad is not None]


@program
def anomaly_mode(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        loss = (x @ x).tanh().exp().sum()
        evict()
        return gradients(loss, x)


@program
def default_device_context(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    with torch.device("meta"):  # a function mode: it must not see the session's own tensors
        evict()
        return gradients(loss, x)


class Loud(torch.Tensor):
    """A subclass that keeps its type through operators."""


@program
def tensor_subclass(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x.as_subclass(Loud) @ x).tanh().exp().sum()
    evict()
    return gradients(loss.as_subclass(torch.Tensor), x)


def run(body: Program, evict: Evict) -> list[torch.Tensor]:
    """Run a program from a fixed seed."""
    torch.manual_seed(0)
    return [result.detach().clone() for result in body(evict)]
