"""Arguments are taken apart and put together again, and the template holds no tensor."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from swapkit._runtime.recompute.arguments import Template

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    value: Any


@dataclasses.dataclass
class Loose:
    value: Any
    parent: Any = None


def rebuilt(value: Any) -> Any:
    template = Template(value)
    return template.rebuild(template.take_tensors())


def test_value_when_rebuilt_then_equal_in_every_container() -> None:
    t = torch.ones(2)
    value = (
        [t, {"a": (t, 1)}],
        Pair(t, "x"),
        OrderedDict(b=t),
        Frozen("n", [t]),
        Loose(t),
        functools.partial(max, t, key=t),
    )
    result = rebuilt(value)
    assert result[0] == [t, {"a": (t, 1)}]
    assert type(result[1]) is Pair
    assert result[1].first is t
    assert type(result[2]) is OrderedDict
    assert result[2]["b"] is t
    assert (result[3].name, result[3].value) == ("n", [t])
    assert type(result[4]) is Loose
    assert result[4].value is t
    assert (result[5].func, result[5].args, result[5].keywords) == (max, (t,), {"key": t})


def test_tensor_when_given_twice_then_taken_once_and_the_same_again() -> None:
    t, other = torch.ones(2), torch.ones(2)
    template = Template({"a": t, "b": [t, other]})
    assert len(template.take_tensors()) == 2
    result = template.rebuild([other, t])
    assert result["a"] is result["b"][0] is other
    assert result["b"][1] is t


def test_container_when_given_twice_then_the_same_again() -> None:
    shared = [torch.ones(2)]
    first, second = rebuilt((shared, shared))
    assert first is second
    assert first is not shared


def test_what_holds_no_tensor_when_rebuilt_then_the_same_object() -> None:
    plain, module = {"a": [1, 2]}, torch.nn.Linear(2, 2)
    value = (plain, module, Loose("x"), functools.partial(max, 1), [torch.ones(1)])
    result = rebuilt(value)
    assert all(one is other for one, other in zip(result[:4], value[:4], strict=True))
    assert result[4] is not value[4]


def test_containers_when_they_contain_themselves_then_passed_through() -> None:
    knot = Loose(torch.ones(1))
    knot.parent = knot
    result = rebuilt(knot)
    assert result.value is knot.value
    assert result.parent is knot


def test_inference_tensor_when_handed_in_then_passed_through() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    template = Template([tensor])
    assert template.take_tensors() == []
    assert template.rebuild([])[0] is tensor


@pytest.mark.usefixtures("no_collector")
def test_template_when_its_tensors_were_taken_then_it_holds_none_nor_after_a_rebuild() -> None:
    tensor = torch.ones(2)
    value = ([tensor], Frozen("x", {"k": tensor}), functools.partial(max, tensor))
    template = Template(value)
    held = weakref.ref(tensor)
    del value, tensor
    assert held() is not None
    template.take_tensors()
    assert held() is None
    again = torch.ones(2)
    held = weakref.ref(again)
    template.rebuild([again])
    del again
    assert held() is None
