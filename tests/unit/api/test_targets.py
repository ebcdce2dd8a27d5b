"""Decorated functions and methods behave as Python's own: bound, inspected, pickled, compiled."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import swapkit
from tests.unit.scoped import copied, gradient

DECORATORS = [swapkit.checkpoint, swapkit.offload, swapkit.keep]


@swapkit.offload
def at_module_level(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
    return x.sin() * times


class Methods:
    """Methods with a choice, decorated above and below Python's own decorators."""

    factor = 2.0

    @swapkit.offload
    def bound(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor).sin()

    @swapkit.offload
    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return (x * cls.factor).sin()

    @classmethod
    @swapkit.offload
    def of_class_inside(cls, x: torch.Tensor) -> torch.Tensor:
        return (x * cls.factor).sin()

    @swapkit.offload
    @staticmethod
    def free(x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0).sin()

    @staticmethod
    @swapkit.offload
    def free_inside(x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0).sin()


@pytest.mark.parametrize(
    "name",
    [each for each in vars(Methods) if callable(getattr(Methods(), each)) and each[0] != "_"],
)
def test_method_when_decorated_then_it_binds_as_without(name: str) -> None:
    method = getattr(Methods(), name)
    assert list(inspect.signature(method).parameters) == ["x"]
    before = copied()
    assert torch.equal(gradient(method), gradient(lambda x: (x * 2.0).sin()))
    assert copied() > before


@pytest.mark.parametrize("decorate", DECORATORS)
def test_function_when_decorated_then_it_is_a_function_still(decorate: object) -> None:
    def plain(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        """Say something."""
        return x.sin() * times

    plain.note = "mine"  # type: ignore[attr-defined]
    function = decorate(plain)  # type: ignore[operator]
    assert inspect.isfunction(function)
    assert inspect.signature(function) == inspect.signature(plain)
    assert inspect.unwrap(function) is plain
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "note")
    assert [getattr(function, each) for each in names] == [getattr(plain, each) for each in names]
    assert copy.copy(function) is copy.deepcopy(function) is function


def test_function_when_decorated_then_a_pickle_finds_it_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level


def test_caller_of_a_decorated_function_when_compiled_then_it_gives_the_same() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return at_module_level(x) + 1

    x = torch.ones(3)
    assert torch.equal(torch.compile(call, backend="eager")(x), call(x))
