"""Operator times on hardware that is not at hand, for planning before you rent it.

A roofline model: an operator takes the longer of its arithmetic and its memory traffic, plus one
launch. FLOP counts come from `torch.utils.flop_counter`; causal attention counts half. The figures
for known devices are in `HARDWARE`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import flop_counter

from swapkit._runtime.operators.names import Operator
from swapkit._runtime.recording.tables.storages import tensors_in
from swapkit.errors import InvalidArgument

_aten = torch.ops.aten
_HALF_BYTES = 2  # rates are for elements of this size; elements twice as large take twice as long
_FOR_CPU = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_FOR_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
_ATTENTION = "attention"
_SCALED_DOT_PRODUCT = "_scaled_dot_product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The speed of a device, as training reaches it, not as the data sheet gives it.

    Rates are for two-byte elements. `device`: torch's name for the device type.
    """

    flops_per_second: float  # of matrix products
    attention_flops_per_second: float
    memory_bytes_per_second: float
    launch_seconds: float = 0.0  # added to each operator
    name: str = ""
    device: str = "cuda"

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            InvalidArgument: a figure is out of range.
        """
        for field in ("flops", "attention_flops", "memory_bytes"):
            value = getattr(self, f"{field}_per_second")
            if not value > 0:
                raise InvalidArgument(f"{field}_per_second={value!r}: expected more than 0")
        if not self.launch_seconds >= 0:
            raise InvalidArgument(f"launch_seconds={self.launch_seconds!r}: expected 0 or more")

    def seconds(
        self, function: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: object
    ) -> float:
        """Return the time that an operator takes with these arguments and results."""
        given: list[torch.Tensor] = []
        tensors_in((*args, *kwargs.values()), given)
        made: list[torch.Tensor] = []
        tensors_in((result,), made)
        moved_bytes = sum(map(_touched_bytes, given)) + sum(map(_touched_bytes, made))
        seconds = moved_bytes / self.memory_bytes_per_second
        flops = count_flops(function, args, kwargs, result)
        if flops:
            is_attention = _ATTENTION in str(function)
            rate = self.attention_flops_per_second if is_attention else self.flops_per_second
            rate *= _HALF_BYTES / max(1, given[0].element_size())
            seconds = max(seconds, flops / rate)
        return seconds + self.launch_seconds


# Rates that training reaches; memory at 90 % of the data sheets.
# H100 SXM: 989 TFLOP/s dense in bfloat16, 3.35 TB/s (NVIDIA H100 data sheet). H200: the same
# arithmetic, 4.8 TB/s (NVIDIA H200 data sheet). A100 SXM 80 GB: 312 TFLOP/s, 2.04 TB/s (NVIDIA
# A100 data sheet). Large matrix products reach about 70 % of the arithmetic. Attention forward and
# backward: FlashAttention-3 on an H100 about 540 TFLOP/s, FlashAttention-2 on an A100 about 190
# (figures of both papers). Ascend 910B: 313 TFLOP/s in half precision and 1.6 TB/s, as cloud
# providers publish for the 910B3; the manufacturer has no public data sheet.
HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        Hardware(
            name="H100",
            flops_per_second=690e12,
            attention_flops_per_second=540e12,
            memory_bytes_per_second=3.0e12,
            launch_seconds=3e-6,
        ),
        Hardware(
            name="H200",
            flops_per_second=690e12,
            attention_flops_per_second=540e12,
            memory_bytes_per_second=4.3e12,
            launch_seconds=3e-6,
        ),
        Hardware(
            name="A100",
            flops_per_second=220e12,
            attention_flops_per_second=190e12,
            memory_bytes_per_second=1.8e12,
            launch_seconds=4e-6,
        ),
        Hardware(
            name="Ascend 910B",
            flops_per_second=220e12,
            attention_flops_per_second=160e12,
            memory_bytes_per_second=1.4e12,
            launch_seconds=6e-6,
            device="npu",
        ),
    )
}


def hardware_named(hardware: Hardware | str) -> Hardware:
    """Return hardware by its name, in any case; return a `Hardware` unchanged.

    Raises:
        InvalidArgument: no hardware has this name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    names = {name.lower(): each for name, each in HARDWARE.items()}
    if str(hardware).lower() not in names:
        raise InvalidArgument(
            f"hardware={hardware!r}: expected a Hardware or one of {', '.join(HARDWARE)}"
        )
    return names[str(hardware).lower()]


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
