"""Functions of a batch and a weight, for programs that compile them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.backends import common
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, ROWS = 64, 256  # of the batch; the weight is a square


@contextmanager
def without_operators() -> Iterator[None]:
    """Let torch compile graphs as it does without swapkit."""
    compile_graphs = vars(common)["aot_module_simplified"]
    with (
        torch._inductor.config.patch(custom_partitioner_fn=None),
        patch.object(common, "aot_module_simplified", compile_graphs.__wrapped__),
    ):
        yield


def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = nn.functional.gelu(x @ weight)
    return x


def with_output_saved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).tanh()
    return torch.cat((y.sin(), y))


def with_pieces(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second, third = (x @ weight.repeat(1, 3)).chunk(3, -1)
    return (first.view(-1, 8, 8) * second.view(-1, 8, 8)).tanh().flatten(1) + third.sin()


def with_dropout(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(layers(x, weight), 0.5) @ weight


def with_images(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    images = x.reshape(-1, 4, 8, 8)  # inductor makes them channels-last
    kernel = weight[:9, :16].reshape(4, 4, 3, 3)
    for _ in range(2):
        images = nn.functional.conv2d(images, kernel, padding=1)
        images = nn.functional.batch_norm(images, None, None, training=True).relu()
    return images.mean((2, 3))


def with_joined(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first = (x @ weight).tanh()
    second = first @ weight
    rows, columns = torch.cat((first, second)), torch.cat((first, second), 1)
    return (columns @ columns.t()).sin().sum(1) + (rows @ weight).tanh().chunk(2)[1].sum(1)


@torch.compiler.nested_compile_region
def region_inside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x @ weight).tanh()


def with_regions(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = region_inside(x, weight).exp() @ weight
    return x.sin()


def with_checkpoint(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = checkpoint(with_dropout, x, weight, use_reentrant=False)
    return x.tanh() @ weight


class KeepsOnCtx(torch.autograd.Function):
    """Keeps a result where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = ctx.result = x.exp()
        return result.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ctx.result
        return grad * result.cos() * result


def with_ctx(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = KeepsOnCtx.apply(layers(x, weight) * 1e-3)
    return result @ weight


def with_late_readers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = (x @ weight).tanh()
    return (hidden * hidden.flip(1)).cos() + hidden.sin()


def with_complex(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_complex((x @ weight).view(-1, WIDTH // 2, 2))
    squares = torch.view_as_real(values * values.conj()).sum(-1)
    return ((values.abs() * values.angle()).sin() + squares.tanh()).exp().tanh()


def with_choices(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Backwards that scatter into zeros, and loops that inductor fuses outside on the CPU."""
    a = x @ weight
    (ranked, places), best, most = a.sort(1), a.topk(9, 1)[0], a.max(1)[0]
    deviation, mean = torch.var_mean(a, 1)
    images = a.view(4, 4, -1, 16)
    results = (
        *(ranked.exp().sin(), best.tanh(), most.exp(), a.gather(1, places).exp()),
        (a - mean[:, None]) * deviation[:, None].rsqrt(),
        *(nn.functional.max_pool2d(images, 2).exp(), nn.functional.group_norm(images, 2).sin()),
        *(nn.functional.layer_norm(a, (WIDTH,)).tanh(), a.cummax(0)[0].tanh()),
        *(a.kthvalue(3, 1)[0].exp(), a.median(0)[0].sin()),
    )
    return torch.cat([each.flatten() for each in results])


def with_effects(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = (x @ weight).tanh()
    square = hidden.t() @ hidden + torch.eye(WIDTH)
    root: torch.Tensor = torch.linalg.cholesky(square)
    return (hidden @ root).sin() @ weight


def with_equal_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Torch computes them once; views of the second one have another storage in its traces."""
    first, second = (x @ weight).tanh(), (x @ weight).tanh()
    view = second.view(-1)
    return ((first * first.sin()) @ weight).exp().view(-1) + view * 2


def with_function_gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = (x @ weight).tanh()
    gradient: torch.Tensor = torch.func.grad(lambda each: (hidden @ each).sin().sum())(weight)
    return hidden.exp() @ gradient


def in_bfloat16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layers(x, weight).float()


FUNCTIONS = (
    layers,
    with_output_saved,
    with_pieces,
    with_dropout,
    with_joined,
    with_images,
    with_regions,
    with_checkpoint,
    with_ctx,
    with_late_readers,
    with_complex,
    with_choices,
    with_effects,
    with_equal_parts,
    with_function_gradient,
    in_bfloat16,
)
