"""The arithmetic and the memory traffic of operators, for their time on other hardware.

FLOP counts come from `torch.utils.flop_counter`; causal attention counts half. See
`planning/hardware.py` for the times.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import flop_counter

from swapkit._runtime.operators.names import Operator

_aten = torch.ops.aten
_HALF_BYTES = 2  # FLOPs count for elements of this size; those on larger ones count more
_FOR_CPU = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_FOR_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
_SCALED_DOT_PRODUCT = "_scaled_dot_product"


class OpWork(NamedTuple):
    """What an operator does, as in `Operator`; None: not known."""

    flops: float | None = None
    touched_bytes: int | None = None


UNKNOWN = OpWork()
NO_WORK = OpWork(0.0, 0)


def find_work(
    function: Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: object,
    touched: Sequence[torch.Tensor],
) -> OpWork:
    """Return what an operator does with these arguments and results. It never fails.

    `touched`: the tensors among the arguments, then those among the results.
    """
    try:
        touched_bytes = sum(map(_touched_bytes, touched))
        flops = count_flops(function, args, kwargs, result)
    except Exception:  # noqa: BLE001 - formulas of users; tensors without sizes or strides
        return UNKNOWN
    if flops:
        flops *= max(1, touched[0].element_size()) / _HALF_BYTES
    return OpWork(flops, touched_bytes)


def count_flops(
    function: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: object
) -> float:
    """Return the FLOPs of a matrix product, a convolution or attention; 0 for other operators."""
    packet = getattr(function, "overloadpacket", function)
    if packet is _FOR_CPU:
        packet = _aten._scaled_dot_product_flash_attention  # noqa: SLF001
    elif packet is _FOR_CPU_BACKWARD:
        packet = _aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
    formula = flop_counter.flop_registry.get(packet)
    if formula is None:
        return 0.0
    given = _with_equal_heads(args) if _SCALED_DOT_PRODUCT in str(packet) else args
    flops = float(formula(*given, **kwargs, out_val=result))
    return flops / 2 if _is_causal(function, args, kwargs) else flops


def _with_equal_heads(args: Sequence[Any]) -> list[Any]:
    """Return attention's arguments; as shapes with the queries' heads if they have four dimensions.

    torch 2.10's formulas refuse keys and values of fewer heads; later ones count the same for both.
    """
    heads = args[0].size(1)  # of the queries; in backward, of the output's gradient
    return [
        (each.size(0), heads, *each.shape[2:])
        if isinstance(each, torch.Tensor) and each.dim() == 4
        else each
        for each in args
    ]


def _is_causal(function: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    index = _causal_argument(function)
    if index is None:
        return False
    return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))


@functools.cache
def _causal_argument(function: Operator) -> int | None:
    schema = getattr(function, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory; expanded dimensions count once."""
    if tensor.layout is not torch.strided:
        return 0
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count * tensor.element_size()
