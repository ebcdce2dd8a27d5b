"""Decorated functions and methods behave as Python's own: bound, inspected, pickled, compiled."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit.errors import InvalidArgument
from tests.unit.scoped import copied, gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class StaticForward(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0).sin()


class ClassForward(nn.Module):
    factor = 2.0

    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return (x * cls.factor).sin()


class CallForward(nn.Module):
    class Sine:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2.0).sin()

    forward = Sine()


@pytest.mark.parametrize("by_instance", [False, True], ids=["class", "both"])
@pytest.mark.parametrize("kind", [StaticForward, ClassForward, CallForward])
def test_forward_of_a_class_when_it_is_no_method_then_it_binds_as_without(
    kind: type[nn.Module], by_instance: bool
) -> None:
    chosen = swapkit.offload(type("Chosen", (kind,), {}))
    module = swapkit.offload(chosen()) if by_instance else chosen()
    before = copied()
    assert torch.equal(gradient(module), gradient(kind()))
    assert copied() > before
    assert len(swapkit.choices(module)) == 1 + by_instance
    twin = copy.deepcopy(module)
    assert torch.equal(gradient(twin), gradient(kind()))


def numbers(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x.sin()


async def later(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@pytest.mark.parametrize("decorate", DECORATORS)
@pytest.mark.parametrize("function", [numbers, later])
def test_function_when_its_body_runs_after_the_call_then_it_is_refused(
    function: object, decorate: Callable[[object], object]
) -> None:
    with pytest.raises(InvalidArgument, match="runs after the call"):
        decorate(function)
