"""Operators take as long as arithmetic or memory traffic, whichever is longer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swapkit._runtime.recording.tables.roofline import (
    HARDWARE,
    Hardware,
    count_flops,
    hardware_named,
)
from swapkit.errors import InvalidArgument

aten = torch.ops.aten
PLAIN = Hardware(
    flops_per_second=1e12,
    attention_flops_per_second=1e11,
    memory_bytes_per_second=1e9,
    launch_seconds=1e-3,
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def seconds(function: Any, *args: Any, **kwargs: Any) -> float:
    return PLAIN.seconds(function, args, kwargs, function(*args, **kwargs))


def test_addition_when_it_runs_then_its_bytes_count() -> None:
    assert seconds(aten.add.Tensor, meta(1000), meta(1000)) == pytest.approx(1e-3 + 6000 / 1e9)


def test_expanded_operand_when_it_is_read_then_its_memory_counts_once() -> None:
    wide = meta(1).expand(1000)
    assert seconds(aten.add.Tensor, meta(1000), wide) == pytest.approx(1e-3 + 4002 / 1e9)


def test_product_when_it_is_large_then_its_arithmetic_counts() -> None:
    side = 1 << 14
    expected = 2 * side**3 / 1e12
    assert seconds(aten.mm.default, meta(side, side), meta(side, side)) == pytest.approx(
        1e-3 + expected
    )


def test_product_when_numbers_are_twice_as_long_then_it_takes_twice_the_time() -> None:
    side = 1 << 14
    wide = [meta(side, side, dtype=torch.float32) for _ in range(2)]
    assert seconds(aten.mm.default, *wide) == pytest.approx(1e-3 + 2 * 2 * side**3 / 1e12)


@pytest.mark.parametrize("name", ["", "_for_cpu"])
def test_attention_when_it_is_causal_then_half_of_it_counts(name: str) -> None:
    function = getattr(aten, f"_scaled_dot_product_flash_attention{name}").default
    heads = [meta(1, 8, 4096, 64) for _ in range(3)]
    whole = 4 * 8 * 4096**2 * 64
    assert count_flops(function, heads, {}, function(*heads)) == whole
    causal = function(*heads, is_causal=True)
    assert count_flops(function, heads, {"is_causal": True}, causal) == whole / 2
    assert count_flops(function, [*heads, 0.0, True], {}, causal) == whole / 2
    assert seconds(function, *heads, is_causal=True) == pytest.approx(1e-3 + whole / 2 / 1e11)


@pytest.mark.parametrize("name", ["", "_for_cpu"])
def test_attention_when_queries_share_keys_then_it_counts_as_if_they_had_their_own(
    name: str,
) -> None:
    function = getattr(aten, f"_scaled_dot_product_flash_attention{name}")
    backward = getattr(aten, f"_scaled_dot_product_flash_attention{name}_backward")
    query, key, value = meta(1, 8, 4096, 64), meta(1, 2, 4096, 64), meta(1, 2, 4096, 64)
    product = 2 * 8 * 4096**2 * 64
    assert count_flops(function.default, [query, key, value], {}, None) == 2 * product
    given = [meta(1, 8, 4096, 64), query, key, value]
    assert count_flops(backward.default, given, {}, None) == 5 * product


def test_hardware_when_it_is_named_then_case_does_not_matter() -> None:
    assert hardware_named("h100") is HARDWARE["H100"]
    assert hardware_named(PLAIN) is PLAIN
    assert all(each.flops_per_second > 1e14 for each in HARDWARE.values())


@pytest.mark.parametrize(
    "field", ["flops_per_second", "attention_flops_per_second", "memory_bytes_per_second"]
)
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_hardware_when_a_figure_is_not_possible_then_it_is_refused(
    field: str, value: float
) -> None:
    figures = dict.fromkeys(
        ["flops_per_second", "attention_flops_per_second", "memory_bytes_per_second"], 1.0
    )
    with pytest.raises(InvalidArgument, match=field):
        Hardware(**{**figures, field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="launch_seconds"):
        Hardware(**figures, launch_seconds=-1.0)  # type: ignore[arg-type]
