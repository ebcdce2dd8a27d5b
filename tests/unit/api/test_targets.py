"""Decorated functions and methods behave as Python's own: bound, inspected, pickled, compiled."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
import wrapt
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


@pytest.mark.filterwarnings("ignore:The .grad:UserWarning")
def test_caller_of_a_decorated_function_when_compiled_then_the_choice_holds() -> None:
    before = copied()
    gradient(torch.compile(lambda x: at_module_level(x * 2) + 1, backend="eager"))
    assert copied() > before


def test_function_when_made_anew_from_its_code_then_the_choice_holds() -> None:
    # So do pickles by value, as of functions of `__main__`.
    function: Any = at_module_level
    made = types.FunctionType(
        function.__code__, function.__globals__, None, function.__defaults__, function.__closure__
    )
    before = copied()
    gradient(lambda x: made(x * 2))
    assert copied() > before


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


def test_forward_when_it_is_no_method_and_pickled_then_the_class_has_it_without_choices() -> None:
    loaded = pickle.loads(pickle.dumps(swapkit.offload(StaticForward())))
    assert swapkit.choices(loaded).remove() == 1
    assert "forward" not in vars(loaded)


class FunctionForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: (x * 2.0).sin()


class PartialForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(StaticForward.forward)


@pytest.mark.filterwarnings("ignore:The .grad:UserWarning")
@pytest.mark.parametrize(
    "kind", [StaticForward, ClassForward, CallForward, FunctionForward, PartialForward]
)
def test_forward_when_it_is_no_method_in_a_compiled_model_then_the_choice_holds(
    kind: type[nn.Module],
) -> None:
    module = swapkit.offload(kind())
    torch._dynamo.reset()
    before = copied()
    gradient(torch.compile(nn.Sequential(module), backend="eager"))
    assert copied() > before


@pytest.mark.parametrize("decorate", DECORATORS)
def test_model_with_a_choice_inside_when_exported_strictly_then_as_without(
    decorate: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(decorate(nn.Linear(3, 3)))
    x = torch.ones(1, 3)
    exported = torch.export.export(model, (x,), strict=True)
    assert torch.equal(exported.module()(x), model(x))


def noting(found: list[object]) -> Any:
    """Return a decorator whose functions note what they are bound to, when they are called."""

    @wrapt.decorator
    def note(wrapped: Any, instance: object, args: Any, kwargs: Any) -> Any:
        found.append(instance)
        return wrapped(*args, **kwargs)

    return note


def test_forward_when_a_choice_is_below_a_decorator_then_both_hold() -> None:
    found: list[object] = []
    function = swapkit.checkpoint(noting(found)(swapkit.offload(lambda x: (x * 2.0).sin())))
    gradient(function)
    assert found


def test_forward_when_a_descriptor_binds_it_then_it_still_does() -> None:
    found: list[object] = []

    class Noted(nn.Module):
        @noting(found)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2.0).sin()

    module = swapkit.offload(Noted())
    before = copied()
    gradient(module)
    assert copied() > before
    assert found == [module]


def test_forward_when_chosen_for_then_it_has_the_attributes_of_a_method() -> None:
    module, plain = swapkit.offload(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert inspect.ismethod(module.forward)
    assert module.forward.__self__ is module
    assert copy.copy(module.forward) is module.forward
    around, expected = (
        functools.update_wrapper(functools.partial(print), each.forward) for each in (module, plain)
    )
    assert vars(around).keys() == vars(expected).keys()  # as around hooks of accelerate's


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
