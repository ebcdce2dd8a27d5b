"""`choices`: what was chosen, by whom, whether it holds; and taking it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.user_choices.wrapping import make_part
from swapkit.errors import InvalidArgument
from swapkit.registry import Choice, Recompute, Source, Swap
from tests.unit.scoped import Block, Model, copied, gradient, make_model


def shown(model: torch.nn.Module) -> list[tuple[str, str, str, bool, str]]:
    return [(row.where, row.what, row.by, row.holds, row.reason) for row in swapkit.choices(model)]


def test_choices_when_there_are_none_then_it_says_so() -> None:
    found = swapkit.choices(make_model())
    assert len(found) == 0
    assert str(found) == "no choices for Model"


def test_choices_when_made_in_several_ways_then_each_with_its_source_and_reason() -> None:
    model = make_model()
    swapkit.offload(model, r"layers\.[01]", prefetch=2)
    swapkit.checkpoint(model.layers[0])
    swapkit.keep(model.get_submodule("layers.2.up"))
    assert shown(model) == [
        ("layers.0", "swap to host, prefetch 2", "pattern", False, "it is recomputed"),
        ("layers.0", "recompute", "decorator", True, ""),
        ("layers.1", "swap to host, prefetch 2", "pattern", True, ""),
        ("layers.2.up", "keep", "decorator", True, ""),
    ]
    assert str(swapkit.choices(model)).splitlines() == [
        "where        what                      by         holds",
        "layers.0     swap to host, prefetch 2  pattern    no: it is recomputed",
        "layers.0     recompute                 decorator  yes",
        "layers.1     swap to host, prefetch 2  pattern    yes",
        "layers.2.up  keep                      decorator  yes",
    ]


def test_choices_when_inside_a_recomputed_module_then_a_swap_does_not_hold() -> None:
    model = make_model()
    swapkit.checkpoint(model, r"layers\.0")
    swapkit.offload(model, r"layers\.\d\.up")
    assert [(row.where, row.holds, row.reason) for row in swapkit.choices(model)] == [
        ("layers.0", True, ""),
        ("layers.0.up", False, "layers.0 is recomputed"),
        ("layers.1.up", True, ""),
        ("layers.2.up", True, ""),
    ]


def test_choices_when_for_a_class_then_shown_at_its_modules() -> None:
    kind = swapkit.offload(type("Chosen", (Block,), {}))
    model = Model()
    model.layers[1] = kind()
    swapkit.checkpoint(model.layers[1])
    assert shown(model) == [
        ("layers.1", "swap to host", "decorator", False, "it is recomputed"),
        ("layers.1", "recompute", "decorator", True, ""),
    ]


def test_class_and_module_when_both_chosen_for_then_judged_together() -> None:
    torch.manual_seed(3)
    kind = swapkit.offload(type("Chosen", (Block,), {}))
    block = swapkit.checkpoint(kind())
    before = copied()
    gradient(lambda x: block(x * 1))
    assert copied() == before  # recompute wins: not even its input is swapped


def test_choices_when_removed_then_the_model_is_as_before() -> None:
    model = make_model()
    expected = gradient(model)
    swapkit.offload(model, r"layers\.\d")
    swapkit.checkpoint(model.layers[1])
    found = swapkit.choices(model)
    assert found.remove(r"layers\.1") == 2
    assert [row.where for row in found] == ["layers.0", "layers.2"]
    assert found.remove(by="decorator") == 0
    assert found.remove(by="pattern") == 2
    assert not any("forward" in module.__dict__ for module in model.modules())
    before = copied()
    assert torch.equal(gradient(model), expected)
    assert copied() == before


def test_choices_when_removed_between_forward_and_backward_then_the_graph_keeps_working() -> None:
    model = make_model()
    expected = gradient(model)
    swapkit.offload(model, r"layers\.0")
    swapkit.checkpoint(model, r"layers\.1")

    def run(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        swapkit.choices(model).remove()
        return loss

    assert torch.equal(gradient(run), expected)


def test_choice_of_a_class_when_removed_from_one_module_then_others_keep_it() -> None:
    kind = swapkit.offload(type("Chosen", (Block,), {}))
    one, other = kind(), kind()
    assert swapkit.choices(one).remove() == 1
    assert len(swapkit.choices(one)) == 0
    assert len(swapkit.choices(other)) == 1
    before = copied()
    gradient(lambda x: one(x * 1))
    assert copied() == before
    gradient(lambda x: other(x * 1))
    assert copied() > before


def test_operator_when_it_has_not_run_then_it_says_so() -> None:
    model = make_model()
    row = Choice(source=Source.CONFIGURATION, what=Recompute(), operator="tanh")
    make_part(model.layers[0]).add(row)
    assert str(swapkit.choices(model)).endswith("yes, 0 operators so far")
    gradient(model)
    assert str(swapkit.choices(model)).endswith("yes, 1 operators so far")


def test_operator_when_two_choices_are_for_it_then_judged_by_themselves() -> None:
    model = make_model()
    swapkit.offload(model.layers[0])
    for what in (Swap(prefetch=2), Recompute()):
        row = Choice(source=Source.CONFIGURATION, what=what, operator="tanh")
        make_part(model.layers[0]).add(row)
    assert [(row.where, row.holds, row.reason) for row in swapkit.choices(model)] == [
        ("layers.0", True, ""),
        ("layers.0.tanh", False, "it is recomputed"),
        ("layers.0.tanh", True, ""),
    ]


class Double(torch.autograd.Function):
    """Twice what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return grad * 2


def test_choices_when_for_functions_then_listed_and_taken_back() -> None:
    @swapkit.checkpoint
    def activate(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.exp().sin()

    runs: list[int] = []
    swapkit.offload(Double)
    assert [(row.what, row.by, row.holds) for row in swapkit.choices(Double)] == [
        ("swap to host", "decorator", True)
    ]
    assert [row.what for row in swapkit.choices(activate)] == ["recompute"]
    every = {row.where: row.what for row in swapkit.choices()}
    assert every["Double"] == "swap to host"
    name = "test_choices_when_for_functions_then_listed_and_taken_back.<locals>.activate"
    assert every[name] == "recompute"

    before = get_runtime().current_swapper().counters().recomputed
    x = torch.randn(8, requires_grad=True)
    activate(x).sum().backward()
    assert get_runtime().current_swapper().counters().recomputed == before + 1
    assert swapkit.choices(activate).remove() == 1
    assert swapkit.choices().remove("Double") == 1
    activate(x).sum().backward()
    assert get_runtime().current_swapper().counters().recomputed == before + 1
    assert len(runs) == 2
    assert not swapkit.choices(activate)
    assert str(swapkit.choices(Double)) == "no choices for functions"
    swapkit.adapt_mem_func_wrapper(Double, x).sum().backward()


def test_choices_when_for_a_class_of_modules_then_those_of_its_forward() -> None:
    @swapkit.offload
    class Part(torch.nn.Linear):
        pass

    assert [row.what for row in swapkit.choices(Part)] == ["swap to host"]
    assert swapkit.choices(Part).remove() == 1
    assert not swapkit.choices(Part(2, 2))


def test_argument_when_wrong_then_named() -> None:
    with pytest.raises(InvalidArgument, match=r"expected a torch\.nn\.Module.* got 3"):
        swapkit.choices(3)
    with pytest.raises(InvalidArgument, match=r"pattern '\('"):
        swapkit.choices(make_model()).remove("(")
    with pytest.raises(InvalidArgument, match="repetition number is too large"):
        swapkit.choices(make_model()).remove("a{4294967296}")
    with pytest.raises(InvalidArgument, match="by='me': expected one of decorator, pattern"):
        swapkit.choices(make_model()).remove(by="me")
