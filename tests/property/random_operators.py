"""Operators of random programs: two values to a third one, all of one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 16, 24  # 1.5 KiB: just above the least size that is moved


class Own(torch.autograd.Function):
    """Saves its input, its output and a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y, x.t())
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y, turned = ctx.saved_tensors
        result: torch.Tensor = grad * (2 * x.cos() + 0 * y + 0 * turned.t())
        return result


class ReadsTwice(Own):
    """The same, but reads them twice."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, _, _ = ctx.saved_tensors
        _, y, turned = ctx.saved_tensors
        result: torch.Tensor = grad * (2 * x.cos() + 0 * y + 0 * turned.t())
        return result


def in_place(x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    fresh = x * 1.5  # saves neither x nor its result
    return fresh.add_(0.25).mul_(0.5).exp()


def write_into(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(2, ROWS, COLUMNS)
    room[0], room[1] = x, y
    return room.prod(0)


def split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = (x * y).chunk(2, dim=1)
    return torch.cat([right.exp() * left, left.sin()], dim=1)


def attend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y.t()).softmax(-1) @ (x * y)


def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > y, x * y, y.sin())


def low_precision(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ y.bfloat16().t() @ y.bfloat16()).float().mul(0.1)


def dropped_out(x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.3)


def complex_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    pair = torch.complex(x, y)
    return (pair * pair.conj().t().conj().t()).imag + pair.abs()


def normalised_by_batch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mean, variance = y.detach().mean(0), y.detach().var(0)
    normal = functional.batch_norm(x, mean, variance, training=True)
    return normal + mean * variance  # as it has left them


def in_blocks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    image = (x * y).view(1, 4, 4, COLUMNS)
    return functional.max_pool2d(image, 3, 1, 1).view(ROWS, COLUMNS)


def convolved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = y[:, : ROWS * 3 // 2].reshape(ROWS, 8, 3)
    return functional.conv1d(x[None], weight, padding=1, groups=2)[0]


def attended(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    query, key = (value.view(1, 2, ROWS // 2, COLUMNS) for value in (x, y))
    attend = functional.scaled_dot_product_attention
    return attend(query, key, query, is_causal=True).view(ROWS, COLUMNS)


def cast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = functional.linear(functional.linear(x, y), y.t())
    return product.float() * 0.1


def partly_detached(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (x * y).exp()
    return x * scale + y.detach()


def looked_up(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(ROWS).remainder(5)
    return functional.embedding(rows, x) * y.index_select(0, rows)


def added_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(ROWS).remainder(3)
    return (x * 2).index_add_(0, rows, y).scatter_add(0, rows[:, None].expand_as(x), x)


def sorted_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    values, order = x.sort(1)
    return values * y.gather(1, order)


def several(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = torch.stack([x, y]).unbind(1)
    best, _ = torch.stack([part.cumsum(1).amax(0) for part in parts]).max(1, keepdim=True)
    variance, mean = torch.var_mean(x, 1, keepdim=True)
    return best * mean + variance * y


def written_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    room = x * 1.25
    room.t()[0].copy_(y[0, :ROWS].sin())
    room[1::2].mul_(2).sigmoid_()
    return room * y


def noisy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x)
    return x * noise.bernoulli_(0.7) + y * torch.randn(COLUMNS)


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "exp": lambda x, _y: x.exp(),
    "sigmoid": lambda x, _y: x.sigmoid(),
    "square": lambda x, _y: x * x,
    "attend": attend,
    "transpose": lambda x, y: (x.t() * y.t().sin()).t(),
    "expand": lambda x, y: x[:1].expand(ROWS, -1) * y,
    "slice": lambda x, y: torch.cat([x[1::2] * y[::2], y[: ROWS // 2].exp()]),
    "gather": lambda x, y: x[:, torch.arange(COLUMNS - 1, -1, -1)] * y,
    "permute": lambda x, y: x.view(4, 4, COLUMNS).permute(1, 0, 2).reshape(ROWS, COLUMNS) * y,
    "function": lambda x, _y: Own.apply(x),
    "reads_twice": lambda x, _y: ReadsTwice.apply(x),
    "split": split,
    "in_place": in_place,
    "write_into": write_into,
    "masked": masked,
    "low_precision": low_precision,
    "dropped_out": dropped_out,
    "complex_product": complex_product,
    "normalise": lambda x, _y: functional.layer_norm(x, (COLUMNS,)),
    "numbers": lambda x, y: (1.5 - x * 0.5) / (y.abs() + 2.0),
    "batch_norm": normalised_by_batch,
    "max_pool": in_blocks,
    "convolve": convolved,
    "scaled_attention": attended,
    "autocast": cast,
    "partly_detached": partly_detached,
    "look_up": looked_up,
    "add_at": added_at,
    "sort": sorted_out,
    "several": several,
    "written_view": written_view,
    "noise": noisy,
    "gelu": lambda x, y: functional.gelu(x) * functional.silu(y),
    "relu_in_place": lambda x, y: (x + y).relu_() * y,
    "softmax": lambda x, y: functional.log_softmax(x, 1) + y.logsumexp(0),
    "power": lambda x, y: (x.abs() + 0.5) ** y,
    "lerp": lambda x, y: torch.addcmul(x, y, x, value=0.5).lerp(y, 0.25),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) * y.clamp_min(-0.1),
    "roll": lambda x, y: x.roll(3, 1) * y.flip(0) + functional.pad(x[:, 1:], (0, 1)),
    "batched": lambda x, y: torch.einsum("rc,sc,sd->rd", x, y, y) * 0.05,
    "add_product": lambda x, y: torch.addmm(x, y @ y.t(), x, alpha=0.1),
    "cumulate": lambda x, y: (x * 0.5 + 1).cumprod(1) * y.tril(),
    "group_norm": lambda x, _y: functional.group_norm(x[None], 4)[0],
    "distance": lambda x, y: torch.cdist(x, y) @ y * 0.1,
    "loss": lambda x, y: functional.smooth_l1_loss(x, y) * x + functional.mse_loss(x, y),
    "alpha_dropout": lambda x, y: functional.alpha_dropout(x, 0.2, training=True) * y,
}  # fmt: skip
