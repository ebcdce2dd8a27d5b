"""Device-specific operators for `meta` tensors.

On `meta`, torch decomposes attention into products with a sequence-by-sequence matrix, and dropout
into operators that make a mask of the operand's dtype. On a real device, one fused operator does
each. Within `standing_for`, meta tensors use the operators of the device that they stand for.
Autocast does not support meta tensors: code may disable autocast, but enabling it is refused.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from swapkit._runtime.torch_compat.internals import destroy_library
from swapkit.errors import Unsupported

_Operands: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_HEAD_MULTIPLE = 8  # GPU kernels require head sizes that are multiples of this
_MOST_HEAD = 256
_RANK = 4
_lock = threading.RLock()
_users = 0
_init_autocast = torch.autocast.__init__
_library: torch.library.Library | None = None
_device = "cuda"


@contextlib.contextmanager
def standing_for(device: str) -> Iterator[None]:
    """Make meta tensors use the operators of a device type, process-wide; calls nest."""
    global _users, _library, _device  # noqa: PLW0603 - torch has one table of operators
    with _lock:
        outer, _device = _device, device
        _users += 1
        if _users == 1:
            _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            for name, function in (
                ("scaled_dot_product_attention", _attention),
                ("dropout", _dropout),
            ):
                _library.impl(name, function, "AutogradMeta")  # type: ignore[no-untyped-call]
            torch.autocast.__init__ = _make_autocast  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _device = outer
            _users -= 1
            if _users == 0 and _library is not None:
                destroy_library(_library)
                _library = None
                torch.autocast.__init__ = _init_autocast  # type: ignore[method-assign]


def _make_autocast(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,  # noqa: FBT001, FBT002 - as torch has it
    cache_enabled: bool | None = None,  # noqa: FBT001
) -> None:
    if enabled and device_type in {"meta", _device}:
        raise Unsupported(
            f"autocast({device_type!r}) does not apply to tensors on 'meta', so the trace would "
            "differ from a real step: convert the model instead, e.g. with model.to(torch.bfloat16)"
        )
    _init_autocast(self, "cpu", dtype, enabled, cache_enabled)


def _dropout(operand: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
    if not train or p == 0 or operand.numel() == 0:
        return operand.view_as(operand)
    if _device == "cpu" or p == 1:
        mask: torch.Tensor = _aten.div_.Scalar(torch.empty_like(operand).bernoulli_(1 - p), 1 - p)
        return operand * mask
    return _aten.native_dropout(operand, p, train)[0]  # type: ignore[no-any-return]


class _Asked(NamedTuple):
    """The arguments of attention other than its operands, by torch's names."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


_POSITIONAL = _Asked._fields[:3]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    asked = _Asked(**dict(zip(_POSITIONAL, rest, strict=False)), **options)
    operands = (query, key, value)
    choose = _choose_on_cpu if _device == "cpu" else _choose_on_gpu
    is_dense = all(each.dim() == _RANK for each in operands) and query.is_floating_point()
    attend = choose(operands, asked) if is_dense else _by_products
    result: torch.Tensor = attend(operands, asked)
    width = value.size(-1)
    return result if result.size(-1) == width else result[..., :width]


def _choose_on_cpu(operands: _Operands, asked: _Asked) -> Callable[[_Operands, _Asked], Any]:
    """Return the attention implementation that torch would choose on the CPU."""
    backends: Any = torch.backends.cuda
    mask = asked.attn_mask
    is_plain = not asked.dropout_p and not asked.enable_gqa
    is_fit = len({each.size(-1) for each in operands}) == 1
    is_fit = is_fit and (mask is None or not mask.requires_grad)
    return _flash_on_cpu if backends.flash_sdp_enabled() and is_plain and is_fit else _by_products


def _choose_on_gpu(operands: _Operands, asked: _Asked) -> Callable[[_Operands, _Asked], Any]:
    """Return the attention implementation that torch would choose on a GPU."""
    backends: Any = torch.backends.cuda
    query = operands[0]
    is_half = query.dtype in _HALVES
    is_small = query.size(-1) <= _MOST_HEAD
    if backends.flash_sdp_enabled() and is_half and is_small and asked.attn_mask is None:
        return _flash
    is_fit = (is_half or query.dtype is torch.float32) and not asked.enable_gqa
    return _efficient if backends.mem_efficient_sdp_enabled() and is_fit else _by_products


def _by_products(operands: _Operands, asked: _Asked) -> Any:  # noqa: ANN401 - a tensor
    return _aten._scaled_dot_product_attention_math(  # noqa: SLF001
        *operands,
        asked.attn_mask,
        asked.dropout_p,
        asked.is_causal,
        scale=asked.scale,
        enable_gqa=asked.enable_gqa,
    )[0]


def _flash_on_cpu(operands: _Operands, asked: _Asked) -> Any:  # noqa: ANN401 - a tensor
    bias = _as_bias(asked.attn_mask, operands[0])
    return _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        *operands, asked.dropout_p, asked.is_causal, attn_mask=bias, scale=asked.scale
    )[0]


def _flash(operands: _Operands, asked: _Asked) -> Any:  # noqa: ANN401 - a tensor
    scale = 1 / math.sqrt(operands[0].size(-1)) if asked.scale is None else asked.scale
    return _aten._scaled_dot_product_flash_attention(  # noqa: SLF001
        *map(_pad, operands), asked.dropout_p, asked.is_causal, scale=scale
    )[0]


def _efficient(operands: _Operands, asked: _Asked) -> Any:  # noqa: ANN401 - a tensor
    query, key, _ = operands
    needs_sums = any(each.requires_grad for each in operands) and torch.is_grad_enabled()
    bias = _expand(_as_bias(asked.attn_mask, query), query, key)
    return _aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        *operands, bias, needs_sums, asked.dropout_p, asked.is_causal, scale=asked.scale
    )[0]


def _as_bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as a bias on the scores: torch converts boolean masks to a bias."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _expand(
    bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    if bias is None:
        return None
    return bias.expand(*query.shape[:2], query.size(-2), key.size(-2))


def _pad(operand: torch.Tensor) -> torch.Tensor:
    """Return an operand with its head size padded to the multiple that kernels require."""
    lacking = -operand.size(-1) % _HEAD_MULTIPLE
    return torch.nn.functional.pad(operand, (0, lacking)) if lacking else operand
