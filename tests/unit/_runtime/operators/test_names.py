"""Operators are found by every name they have, and wrong names are refused with near ones."""

from __future__ import annotations

import pytest
import torch

from swapkit._runtime.operators.effects import can_keep
from swapkit._runtime.operators.names import (
    ALIASES,
    find_operators,
    is_random,
    matches,
    operator_names,
)
from swapkit.errors import InvalidArgument

aten = torch.ops.aten


@pytest.mark.parametrize(
    "name",
    [
        "mm",
        "aten.mm",
        "aten::mm",
        "aten.mm.default",
        "aten::mm.default",
        "torch.ops.aten.mm",
        "matmul",
        "linear",
        aten.mm,
        aten.mm.default,
    ],
    ids=str,
)
def test_product_when_named_in_any_way_then_found(name: object) -> None:
    assert matches((name,))(aten.mm.default)
    assert not matches((name,))(aten.tanh.default)


@pytest.mark.parametrize(
    ("name", "operator", "is_meant"),
    [
        ("mul", aten.mul.Tensor, True),
        ("mul", aten.mul_.Tensor, True),
        ("mul_", aten.mul.Tensor, False),
        ("aten.mul.Scalar", aten.mul.Tensor, False),
        ("mul.Tensor", aten.mul.Tensor, None),
        ("flash_attention", aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        ("attention", aten._scaled_dot_product_efficient_attention.default, True),
        ("attention", aten._scaled_dot_product_efficient_attention_backward.default, False),
        ("softmax", aten._softmax.default, True),
        ("softmax", aten._log_softmax.default, False),
        ("norm", aten.native_layer_norm.default, True),
        ("dropout", aten.native_dropout.default, True),
        ("__and__", aten.__and__.Tensor, True),
    ],
)
def test_operator_when_asked_by_a_name_then_meant_or_not(
    name: str, operator: torch._ops.OpOverload, is_meant: bool | None
) -> None:
    if is_meant is None:
        with pytest.raises(InvalidArgument):
            matches((name,))
        return
    assert matches((name,))(operator) is is_meant


def test_higher_order_operator_when_named_or_given_then_found() -> None:
    operator = torch.ops.higher_order.flex_attention
    for name in ("flex_attention", "attention", operator):
        assert matches((name,))(operator)


def test_aliases_when_looked_up_then_each_stands_for_operators_that_exist() -> None:
    for alias in ALIASES:
        assert any(can_keep(each) for each in find_operators(alias)), alias


@pytest.mark.parametrize(("name", "near"), [("matmull", "matmul"), ("aten.softmx", "aten.softmax")])
def test_name_when_unknown_then_refused_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{name}.*{near}"):
        matches((name,))


def test_object_when_no_operator_then_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"torch\.ops"):
        matches((torch.tanh,))


def test_library_when_loaded_after_names_were_looked_up_then_its_operators_are_found() -> None:
    with pytest.raises(InvalidArgument):
        matches(("swapkit_late",))
    library = torch.library.Library("swapkit_test_names", "DEF")
    try:
        library.define("swapkit_late(Tensor x) -> Tensor")
        assert matches(("swapkit_late",))(torch.ops.swapkit_test_names.swapkit_late.default)
    finally:
        library._destroy()


def test_names_when_listed_then_its_own_comes_first() -> None:
    names = operator_names(aten.addmm.default)
    assert names[0] == "addmm"
    assert {"aten.addmm.default", "matmul", "linear"} <= set(names)


def test_random_when_tagged_so_then_noticed() -> None:
    assert is_random(aten.native_dropout.default)
    assert not is_random(aten.mm.default)
