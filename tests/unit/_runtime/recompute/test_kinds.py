"""Calls of regions are told apart by what decides what they do; kinds hold no object."""

from __future__ import annotations

import enum
import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swapkit._runtime.recompute.region_findings import kind_of


class Way(enum.Enum):
    OFF = 0
    ON = 1


class Switched:
    def __init__(self, *, on: bool) -> None:
        self.on = on

    def __call__(self) -> None: ...


def with_default(on: Any) -> Any:
    return lambda value, on=on: value if on else -value


def with_keyword(on: Any) -> Any:
    def function(value: float, *, on: Any = on) -> float:
        return value if on else -value

    return function


def with_closure(on: Any) -> Any:
    return lambda value: value if on else -value


def with_function_inside(on: Any) -> Any:
    inside = with_closure(on)
    return lambda value: -inside(value)


def submodule_in(mode: bool) -> Any:
    MODULE[1].train(mode)
    return MODULE


def module_with(on: bool) -> Any:
    MODULE[0].inplace = on
    return MODULE[0]


MODULE: Any = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout())
FORMS: dict[str, Any] = {
    "itself": lambda on: on,
    "a default": with_default,
    "a default of a keyword": with_keyword,
    "a closure": with_closure,
    "a function in a closure": with_function_inside,
    "a partial": lambda on: functools.partial(with_closure(True), on=on),
    "a list": lambda on: [1, on],
    "a dict": lambda on: {"on": on},
    "an enumeration": lambda on: Way.ON if on else Way.OFF,
    "an enumeration in a closure": lambda on: with_closure(Way.ON if on else Way.OFF),
    "an attribute": lambda on: SimpleNamespace(on=on),
    "an attribute of what is called": lambda on: Switched(on=on),
    "an attribute of a module": module_with,
    "the mode of a submodule": submodule_in,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kind_when_a_switch_is_another_then_another_kind(form: Any) -> None:
    assert kind_of(form(True)) != kind_of(form(False))
    hash(kind_of(form(True)))


@pytest.mark.parametrize(
    "make", [with_default, with_keyword, with_closure, with_function_inside, lambda on: [on]]
)
def test_kind_when_made_anew_for_each_call_then_the_same_kind(make: Any) -> None:
    for bound in (True, 2.5, "a word", torch.ones(2), SimpleNamespace(count=1)):
        assert kind_of(make(bound)) == kind_of(make(bound))
    assert kind_of(make(1)) == kind_of(make(2))  # numbers are no switches


def test_kind_when_functions_of_the_same_text_are_from_different_files_then_another_kind() -> None:
    made = []
    for name in ("one", "two"):
        found: dict[str, Any] = {"__name__": name}
        exec(compile("def f(x): return g(x)", name, "exec"), found)
        made.append(found["f"])
    assert kind_of(made[0]) != kind_of(made[1])


def test_kind_when_what_it_is_of_goes_then_holds_nothing() -> None:
    tensor, thing = torch.ones(2), Switched(on=True)
    kind = kind_of(with_closure([tensor, thing]))
    gone = weakref.ref(tensor), weakref.ref(thing)
    del tensor, thing
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert kind is not None


def test_kind_when_a_module_contains_itself_then_found() -> None:
    module = torch.nn.Sequential(torch.nn.ReLU())
    module[0].register_module("above", module)
    assert kind_of(module) == kind_of(module)
