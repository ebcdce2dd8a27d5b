"""Element types and the bits that are not in the bytes."""

from __future__ import annotations

from typing import Any

import torch

from tests.programs.layouts import bring_back
from tests.programs.registry import SIDE, Evict, gradients, leaf, program


@program()
def other_dtypes(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    grads = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loss = (x.to(dtype) * 0.5).exp().masked_fill(x > 1, 0).float().sum()
        evict()
        grads += gradients(loss, x)
    return grads


@program()
def every_dtype_that_can_be_saved(evict: Evict) -> list[torch.Tensor]:
    whole = [torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    real = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    both = [torch.complex64, torch.complex128]

    def make() -> list[torch.Tensor]:
        source = torch.randn(SIDE, SIDE) * 10
        saved = [source.to(dtype) for dtype in (*whole, *real, *small, *both)]
        return [*saved, source.abs().to(torch.uint8)]

    return bring_back(evict, make)


@program()
def unsigned_integers(evict: Evict) -> list[torch.Tensor]:
    kinds = (torch.uint16, torch.uint32, torch.uint64)
    return bring_back(
        evict, lambda: [torch.randint(0, 200, (SIDE, SIDE)).to(kind) for kind in kinds]
    )


@program()
def not_a_number_and_signed_zero(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        source = torch.randn(SIDE, SIDE)
        source[::2, ::2] = float("nan")
        source[1::2, ::2] = -0.0
        source[::2, 1::2] = float("-inf")
        return [source, source.bfloat16(), source.t()]

    return bring_back(evict, make)


@program()
def float8_round_trip(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x.to(torch.float8_e4m3fn).to(torch.float32)
    loss = (y * y.exp()).sum()
    del y
    evict()
    return gradients(loss, x)


@program("G26")
def complex_conjugate_and_negative(evict: Evict) -> list[torch.Tensor]:
    x = leaf(dtype=torch.complex64)
    y = x * (1 + 2j)
    loss = (y.conj() @ y).abs().sum() + (y.conj().imag * y.real).sum()
    del y
    evict()
    return gradients(loss, x)


@program("G26")
def conj_and_neg_bits_are_kept(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        source = torch.randn(SIDE, SIDE, dtype=torch.complex64)
        negative = source.conj().imag
        assert negative.is_neg()
        return [source.conj(), negative, source, source.conj().t()[2:], source.mH]

    return bring_back(evict, make)


@program()
def integer_and_boolean_indices(evict: Evict) -> list[torch.Tensor]:
    x = leaf(SIDE * 8, SIDE)
    index = torch.randint(0, SIDE * 8, (SIDE * SIDE,)) * 1
    loss = x.index_select(0, index).tanh().sum() + x[x > 0].square().sum()
    del index
    evict()
    return gradients(loss, x)


@program()
def embedding_gather_and_cross_entropy(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(7)
    table = torch.nn.Embedding(200, SIDE)
    tokens = torch.randint(0, 200, (8, 64)) * 1
    hidden = table(tokens)
    logits = hidden @ table.weight.t()
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 200), tokens.view(-1))
    loss = loss + logits.gather(-1, tokens.unsqueeze(-1)).tanh().mean()
    del hidden, logits, tokens
    evict()
    return gradients(loss, table.weight)


@program()
def dropout_masks_and_pooling_indices(evict: Evict) -> list[torch.Tensor]:
    x = leaf(4, 8, 24, 24)
    hidden = torch.nn.functional.dropout(x, 0.4)
    pooled, _ = torch.nn.functional.max_pool2d(hidden, 2, return_indices=True)
    top = pooled.flatten(1).topk(50, dim=1).values
    loss = pooled.square().sum() + top.exp().sum() + hidden.sort(dim=-1).values[..., -1].sum()
    del hidden, pooled, top
    evict()
    return gradients(loss, x)


@program()
def fast_fourier_transform(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    spectrum = torch.fft.rfft2(x)
    loss = (spectrum.abs() * spectrum.angle().cos()).sum()
    del spectrum
    evict()
    return gradients(loss, x)


@program()
def linear_algebra(evict: Evict) -> list[torch.Tensor]:
    x = leaf(48, 48)
    positive = x @ x.t() + 48 * torch.eye(48)
    factor: Any = torch.linalg.cholesky(positive)
    loss = factor.logdet() + torch.linalg.solve(positive, x).sum() + torch.linalg.svdvals(x).sum()
    del positive, factor
    evict()
    return gradients(loss, x)
