"""How saved tensors lie in their storages: views, strides, offsets, aliases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.programs.registry import SIDE, Evict, gradients, leaf, program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ShowsSaved(torch.autograd.Function):
    """Its backward puts what it saved, as it came back, into `seen`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        ctx.count = len(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.extend(ctx.saved_tensors)
        return grad * 2, None, *[None] * ctx.count


def bring_back(evict: Evict, make: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Make tensors and save them, evict, and return them as backward sees them."""
    x = leaf()
    seen: list[torch.Tensor] = []
    loss = ShowsSaved.apply(x, seen, *make()).sum()
    evict()
    grads = gradients(loss, x)
    return [*grads, *seen]


@program()
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


@program()
def overlapping_views_with_and_without_their_base(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        base = torch.arange(SIDE * SIDE, dtype=torch.float32)
        windows = base.unfold(0, SIDE, SIDE // 2)
        return [windows, base[5:-7], base.view(SIDE, SIDE).t(), windows[1:, ::2]]

    return bring_back(evict, make)


@program("G29")
def small_view_of_a_large_base(evict: Evict) -> list[torch.Tensor]:
    x = leaf(SIDE * 20, SIDE)
    hidden = x * 2
    part = hidden[SIDE : 2 * SIDE, 3:40]
    loss = (part * part.exp()).sum()
    del hidden, part
    evict()
    return gradients(loss, x)


@program("G28")
def expanded_and_offset(evict: Evict) -> list[torch.Tensor]:
    x = leaf(SIDE * SIDE)
    base = x * 2
    row = base[SIDE:].as_strided((SIDE, SIDE), (0, 1), SIDE // 2)
    loss = (row * row.sin()).sum() + base.expand(3, -1).exp().mul(1e-3).sum()
    del base, row
    evict()
    return gradients(loss, x)


@program("G28")
def expanded_from_one_number(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    one = torch.tensor(1.5) * 2
    wide = one.expand(SIDE, SIDE)
    loss = (x * wide).exp().mul(1e-3).sum()
    return [*bring_back(evict, lambda: [wide, torch.randn(2, SIDE)]), *gradients(loss, x)]


@program()
def transposes_of_square_matrices(evict: Evict) -> list[torch.Tensor]:
    """One storage, one size, different strides: a key without the strides mixes them up."""
    x = leaf()
    y = x * 2
    loss = (y * y.t() * y.t().contiguous()).sum()
    saved = [y.detach(), y.detach().t(), y.detach().flip(0)]
    del y

    def make() -> list[torch.Tensor]:
        return [saved.pop() for _ in range(3)]

    results = bring_back(evict, make)
    evict()
    return [*results, *gradients(loss, x)]


@program()
def strides_of_every_sort(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        base = torch.randn(4, 6, 8, 10)
        return [
            base.permute(3, 1, 0, 2),
            base.to(memory_format=torch.channels_last),
            torch.randn(2, 4, 6, 8, 6).to(memory_format=torch.channels_last_3d),
            base[1:, 1::2, 2:, ::3],
            base.as_strided((5, 7), (100, 3), 11),
            base.as_strided((3, 0, 4), (1, 1, 1), 2),
            torch.empty_strided((16, 16), (40, 2)).fill_(3),
        ]

    return bring_back(evict, make)


@program()
def channels_last_convolution(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(1)
    conv = torch.nn.Conv2d(8, 8, 3)
    x = leaf(2, 8, 24, 24)
    loss = conv(x.to(memory_format=torch.channels_last) * 1).relu().square().sum()
    evict()
    return gradients(loss, x, *conv.parameters())


@program()
def channels_last_3d_convolution(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(1)
    conv = torch.nn.Conv3d(4, 4, 3)
    x = leaf(2, 4, 8, 10, 12)
    loss = conv(x.to(memory_format=torch.channels_last_3d) * 1).relu().square().sum()
    evict()
    return gradients(loss, x, *conv.parameters())


@program(moves=False)
def zero_size(evict: Evict) -> list[torch.Tensor]:
    x = leaf(0, SIDE)
    loss = (x.exp() * x).sum()
    evict()
    return gradients(loss, x)


@program(moves=False)
def zero_dimensions(evict: Evict) -> list[torch.Tensor]:
    x = torch.tensor(0.7, requires_grad=True)
    loss = (x.exp() * x.sin()).tanh()
    evict()
    return [loss, *gradients(loss, x)]


@program(moves=False)  # the views are small, though their storage is not
def scalar_view_of_a_large_storage(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        base = torch.randn(SIDE, SIDE)
        return [base[17, 3], base[5:5], base.diagonal()]

    return bring_back(evict, make)


@program()
def output_that_is_a_view_of_the_input(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = (x * 1).view(SIDE * 2, -1).transpose(0, 1)
    loss = (y.exp() * y[:, : y.shape[1]]).sum()
    del y
    evict()
    return gradients(loss, x)


@program()
def alias_through_data(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 2
    alias = y.data
    loss = (y * alias * alias.t()).sum()
    del y, alias
    evict()
    return gradients(loss, x)


@program()
def one_tensor_saved_by_many_operators(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 0.5
    loss = sum((y * (y + k)).sin().sum() for k in range(10)) + (y @ y.t()).sum()
    del y
    evict()
    return gradients(loss, x)


@program()
def fused_qkv_with_attention(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(6)
    fused = torch.nn.Linear(SIDE, 3 * SIDE)
    x = leaf(2, 32, SIDE)
    q, k, v = (
        part.view(2, 32, 4, SIDE // 4).transpose(1, 2) for part in fused(x * 1).split(SIDE, dim=-1)
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = out.transpose(1, 2).reshape(2, 32, SIDE).square().sum()
    del q, k, v, out
    evict()
    return gradients(loss, x, *fused.parameters())


@program()
def unbound_and_stacked(evict: Evict) -> list[torch.Tensor]:
    x = leaf(6, SIDE, SIDE)
    parts = (x * 1.1).unbind(0)
    loss = torch.stack([part.exp() * parts[0] for part in parts[1:]]).sin().sum()
    del parts
    evict()
    return gradients(loss, x)
