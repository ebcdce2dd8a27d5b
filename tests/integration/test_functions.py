"""Autograd functions under keep, swap and recompute: the gradients of `Fn.apply`, bit for bit.

What is chosen is for a class, so every test has classes of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit import adapt_mem_func_wrapper
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument
from tests.conformance.modes import settle
from tests.programs import assert_same_bits
from tests.support import MIB, installed, limit_above_reserved
from tests.support.autograd_functions import (
    CALLS,
    CASES,
    SIDE,
    Case,
    Cube,
    Layer,
    Parted,
    Product,
    Scaled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

    Apply = Callable[..., Any]

NBYTES = SIDE * SIDE * 8  # 128 KiB


@pytest.fixture(autouse=True)
def installation() -> Iterator[Installation]:
    CALLS.clear()
    with installed() as installation:
        yield installation


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.function.__name__)


each_case = over(CASES)
# A function that draws random numbers has no derivative.
each_smooth_case = over([case for case in CASES if case.checks])
DECISIONS: dict[str, Any] = {
    "keep": swapkit.keep,
    "swap": swapkit.offload,
    "recompute": swapkit.checkpoint,
}
each_decision = pytest.mark.parametrize("decision", DECISIONS)


def own(function: type[torch.autograd.Function]) -> Any:
    """Return a class of one's own that does the same."""
    return type(function.__name__, (function,), {})


def plainly(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def train(case: Case, apply: Apply, function: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, y = (torch.randn(SIDE, SIDE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = case.call(apply, function, x, y)
    settle()
    grads = torch.autograd.grad(out.square().sum(), (x, y))
    settle()
    return [out.detach(), *grads, torch.rand(2)]


def moved_bytes() -> int:
    return get_runtime().current_swapper().scheduler.stats().copied_out_bytes


# ---- decisions -----------------------------------------------------------------------------------


@each_decision
@each_case
@pytest.mark.promise("D7")
def test_function_when_kept_swapped_or_recomputed_then_same_bits_and_it_is_done(
    case: Case, decision: str
) -> None:
    name = case.function.__name__
    expected = train(case, plainly, case.function)
    function = own(case.function)
    assert DECISIONS[decision](function) is function
    CALLS.clear()
    moved = moved_bytes()
    assert_same_bits(train(case, adapt_mem_func_wrapper, function), expected)
    assert CALLS[name] == 1
    assert (moved_bytes() > moved) == (decision == "swap")
    assert CALLS["none"] == (1 if case.function is Parted else 0)


@each_decision
@each_smooth_case
@pytest.mark.promise("D7")
def test_function_when_checked_numerically_then_its_gradients_are_right(
    case: Case, decision: str
) -> None:
    function = own(case.function)
    DECISIONS[decision](function)
    torch.manual_seed(1)
    # More than 1 KiB, below which nothing moves; positive, so that all of them are smooth.
    x, y = (torch.rand(2, 80, dtype=torch.float64) + 0.5 for _ in range(2))
    x[0] += torch.arange(80).div(8)

    def apply(x: torch.Tensor, y: torch.Tensor) -> Any:
        return case.call(adapt_mem_func_wrapper, function, x, y)

    inputs = (x.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(apply, inputs, fast_mode=True)
    if case.again:
        assert torch.autograd.gradgradcheck(apply, inputs, fast_mode=True)


@each_case
def test_function_when_nothing_is_chosen_then_the_scope_around_holds(case: Case) -> None:
    expected = train(case, plainly, case.function)
    moved = moved_bytes()
    assert_same_bits(train(case, adapt_mem_func_wrapper, case.function), expected)
    assert moved_bytes() == moved
    with swapkit.offload():
        assert_same_bits(train(case, adapt_mem_func_wrapper, case.function), expected)
    assert moved_bytes() > moved


def test_function_when_kept_inside_a_scope_that_swaps_then_what_it_saves_stays() -> None:
    function = swapkit.keep(own(Product))
    x = torch.rand(SIDE, SIDE, dtype=torch.float64, requires_grad=True)
    one, other = x + 1, x + 2  # an addition saves nothing
    moved = moved_bytes()
    with swapkit.offload():
        out = adapt_mem_func_wrapper(function, one, other)
    settle()
    assert moved_bytes() == moved
    with swapkit.offload():
        out = adapt_mem_func_wrapper(Product, one, other)
    settle()
    assert moved_bytes() == moved + 2 * NBYTES
    out.sum().backward()


def test_function_when_swapped_to_stay_then_its_memory_is_given_up_and_when_recomputed_too() -> (
    None
):
    def kept_bytes(function: Any) -> int:
        torch.manual_seed(0)
        x = torch.rand(SIDE, SIDE, dtype=torch.float64, requires_grad=True) * 1
        before = swapkit.memory_stats()["allocated_bytes.all.current"]
        out, _ = adapt_mem_func_wrapper(function, x)
        loss = out.sum()
        del out, _
        settle()
        kept: int = swapkit.memory_stats()["allocated_bytes.all.current"] - before
        loss.backward()
        return kept

    plain = kept_bytes(own(Parted))
    assert plain >= 2 * NBYTES
    assert plain - kept_bytes(swapkit.offload(own(Parted))) >= 2 * NBYTES
    # Less what it takes to draw the same random numbers again.
    assert plain - kept_bytes(swapkit.checkpoint(own(Parted))) >= 2 * NBYTES - 8192


def test_function_when_under_a_budget_then_same_bits_within_it(installation: Installation) -> None:
    case = CASES[3]
    assert case.function is Parted  # what it saves is its own
    expected = train(case, plainly, case.function)
    limit = limit_above_reserved(installation, 2 * MIB)
    function = swapkit.checkpoint(own(Parted))
    with swapkit.budget(limit) as session:
        for chosen in (own(Parted), function):
            torch.manual_seed(0)
            x, y = (torch.randn(SIDE, SIDE, dtype=torch.float64).requires_grad_() for _ in range(2))
            out = case.call(adapt_mem_func_wrapper, chosen, x, y)
            session.rescue(1 << 40)
            grads = torch.autograd.grad(out.square().sum(), (x, y))
            assert_same_bits(list(grads), expected[1:3])
    assert session.stats.peak_bytes <= limit
    assert session.stats.recomputed_regions > 0


# ---- by name, inside a module --------------------------------------------------------------------


def train_layers(chosen: dict[str, Any] | None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    if chosen is not None:
        configuration = swapkit.configure(model, chosen, **options)
        assert configuration.unmatched == []
    x = torch.randn(SIDE, SIDE)
    for layer in model.layers:
        x = layer(x)
    settle()
    x.square().sum().backward()
    settle()
    return [x.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    "options", [{}, {"names": {"moe.PipeExpert": "moe.PipeExpert"}}], ids=["found", "named"]
)
@pytest.mark.promise("D7")
@pytest.mark.promise("B17")
def test_function_when_a_document_names_it_in_a_module_then_it_holds(options: Any) -> None:
    expected = train_layers(None)
    CALLS.clear()
    moved = moved_bytes()
    document: dict[str, Any] = {"recompute_config": {"select_recompute": {r"moe\.PipeExpert": [1]}}}
    assert_same_bits(train_layers(document, **options), expected)
    assert CALLS["PipeExpert"] == 2
    assert moved_bytes() == moved
    document = {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": r"moe\.PipeExpert", "backward_prefetch": 1, "layers": [0]}],
        }
    }
    assert_same_bits(train_layers(document, **options), expected)
    assert CALLS["PipeExpert"] == 4
    assert moved_bytes() > moved


# ---- arguments -----------------------------------------------------------------------------------


def test_arguments_when_given_by_name_then_passed_by_position_with_defaults_between() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    bias = torch.rand(4, 4)
    ours = adapt_mem_func_wrapper(Scaled, x, bias=bias)
    assert torch.equal(ours, Scaled.apply(x, 0.5, bias))
    assert torch.equal(adapt_mem_func_wrapper(Scaled, x=x, factor=2.0), Scaled.apply(x, 2.0))
    assert torch.equal(adapt_mem_func_wrapper(Cube, x, power=2), Cube.apply(x, 2))
    ours.sum().backward()


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {"factor": 1.0}, "Scaled.forward: missing a required argument: 'x'"),
        ((torch.ones(2),), {"other": 1}, "unexpected keyword argument 'other'"),
        ((torch.ones(2),), {"x": torch.ones(2)}, "multiple values for argument 'x'"),
    ],
)
def test_arguments_when_they_do_not_fit_then_refused(args: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        adapt_mem_func_wrapper(Scaled, *args, **kwargs)


def test_arguments_when_only_by_keyword_then_refused_with_what_to_change() -> None:
    class ByKeyword(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *, factor: float) -> Any:
            raise NotImplementedError

    with pytest.raises(InvalidArgument, match=r"'factor' by keyword only.*Make it a positional"):
        adapt_mem_func_wrapper(ByKeyword, torch.ones(2), factor=2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        nn.Linear(2, 2),
        nn.Linear,
        torch.relu,
        lambda x: x,
        Product.apply,
        None,
        "Product",
        torch.autograd.function.FunctionCtx,
    ],
    ids=["module", "module class", "builtin", "lambda", "apply", "None", "name", "context class"],
)
@pytest.mark.promise("D7")
def test_wrapper_when_given_what_is_no_function_class_then_a_type_error_says_what_to_use(
    wrong: Any,
) -> None:
    with pytest.raises(
        TypeError, match=r"torch\.autograd\.Function.*swapkit\.checkpoint"
    ) as raised:
        adapt_mem_func_wrapper(wrong, torch.ones(2))
    assert isinstance(raised.value, swapkit.SwapkitError)


def test_function_when_under_transforms_or_without_gradients_then_a_plain_call() -> None:
    function = swapkit.checkpoint(own(Cube))
    x = torch.rand(3, 4, dtype=torch.float64) + 1

    def cube(value: torch.Tensor) -> Any:
        return adapt_mem_func_wrapper(function, value, 3)

    assert torch.equal(torch.func.vmap(cube)(x), Cube.apply(x, 3))
    grad = torch.func.grad(lambda value: cube(value).sum())(x)
    plain = torch.func.grad(lambda value: Cube.apply(value, 3).sum())(x)
    assert torch.equal(grad, plain)
    CALLS.clear()
    with torch.no_grad():
        cube(x)
    assert CALLS["Cube"] == 1
