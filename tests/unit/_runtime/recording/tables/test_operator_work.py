"""What operators do, and their times from it: arithmetic or traffic, whichever is longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import flop_counter

from swapkit._runtime.recording.tables.operator_work import UNKNOWN, count_flops, find_work
from swapkit._runtime.recording.tables.storages import tensors_in
from swapkit.ir.traces import Operator, Phase
from swapkit.planning.hardware import Hardware

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
    result = function(*args, **kwargs)
    touched: list[torch.Tensor] = []
    tensors_in((*args, result), touched)
    work = find_work(function, args, kwargs, result, touched)
    assert work.flops is not None
    noted = Operator(name=str(function), seconds=1.0, phase=Phase.FORWARD, **work._asdict())
    return PLAIN.seconds(noted)


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


@pytest.mark.parametrize("formula", [ValueError, ZeroDivisionError])
def test_work_when_a_formula_of_a_user_fails_then_it_is_unknown_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, formula: type[Exception]
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise formula

    monkeypatch.setitem(flop_counter.flop_registry, aten.mm, fail)
    operands = meta(2, 2), meta(2, 2)
    assert find_work(aten.mm.default, operands, {}, meta(2, 2), operands) is UNKNOWN


def test_work_when_elements_are_of_one_byte_then_arithmetic_counts_half() -> None:
    side = 64
    halves = [meta(side, side) for _ in range(2)]
    small = [meta(side, side, dtype=torch.int8) for _ in range(2)]
    found = [find_work(aten.mm.default, each, {}, each[0], each).flops for each in (halves, small)]
    assert found == [2 * side**3, side**3]
