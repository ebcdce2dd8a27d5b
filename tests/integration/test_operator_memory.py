"""What chosen operators cost and save: bytes kept, bytes moved, operators repeated."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.user_choices.wrapping import carry_marks, make_part
from swapkit.registry import Choice, Exclude, Recompute, Source, Swap
from tests.conformance.modes import settle
from tests.support import MIB, installed, limit_above_reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit.registry import What

SIDE = 512  # 1 MiB a matrix
SMALL = 0.1  # of one: what is kept beside activations


@pytest.fixture(autouse=True)
def installation() -> Iterator[Installation]:
    with installed() as installation:
        yield installation


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(*args)


def make(body: Callable[..., Any], *chosen: tuple[str, What]) -> nn.Module:
    module = Calls(body)
    rows = [Choice(source=Source.CONFIGURATION, what=what, operator=name) for name, what in chosen]
    make_part(module).add(*rows)
    carry_marks(module)
    return module


def in_use_bytes() -> int:
    gc.collect()
    settle()
    return swapkit.memory_stats()["allocated_bytes.all.current"]


class Cost(NamedTuple):
    """Of one forward and backward: MiB kept between them, MiB moved, operators repeated."""

    kept: float
    moved: float
    repeated: int


def cost(module: nn.Module, *inputs: torch.Tensor) -> Cost:
    swapper = get_runtime().current_swapper()
    before, moved = in_use_bytes(), swapper.scheduler.stats().copied_out_bytes
    repeated = swapper.counters().recomputed
    out = module(*inputs)
    loss = out.sum()
    del out
    kept = in_use_bytes() - before
    torch.autograd.grad(loss, [each for each in inputs if each.requires_grad])
    moved = swapper.scheduler.stats().copied_out_bytes - moved
    return Cost(
        round(kept / MIB, 1), round(moved / MIB, 1), swapper.counters().recomputed - repeated
    )


def leaf() -> torch.Tensor:
    return torch.randn(SIDE, SIDE, requires_grad=True)


def gated(x: torch.Tensor, w: torch.Tensor) -> Any:
    return (F.silu(x) * w) @ w


@pytest.mark.parametrize(
    ("chosen", "kept", "repeated"),
    [
        ((), 2, 0),
        ((("mul", Recompute()),), 1, 1),  # needs the result of silu, which its backward saved
        ((("silu", Recompute()),), 1, 1),
        ((("silu|mul", Recompute()),), 0, 2),  # each of them once
        ((("mul", Recompute()), ("mul", Exclude())), 2, 0),
        ((("mul", Recompute()), ("mul", Swap())), 1, 1),
    ],
    ids=["nothing", "mul", "silu", "chain", "excluded", "recompute beats swap"],
)
def test_results_when_recomputed_then_their_bytes_are_gone_and_each_is_repeated_once(
    chosen: Any, kept: float, repeated: int
) -> None:
    assert cost(make(gated, *chosen), leaf(), leaf()) == Cost(kept, 0, repeated)


def test_results_when_swapped_then_their_bytes_are_moved_once() -> None:
    assert cost(make(gated, ("silu", Swap())), leaf(), leaf()) == Cost(1, 1, 0)
    in_place = make(lambda x, w: (x + 1).relu_() @ w, ("relu", Swap()))
    assert cost(in_place, leaf(), leaf()) == Cost(0, 1, 0), "what it makes is what it changed"
    view = make(lambda x, w: (x + 1).add_(1).t() @ w, ("t", Swap()))
    assert cost(view, leaf(), leaf()) == Cost(0, 1, 0), "a view moves what it views"


def test_result_when_nobody_saves_it_then_no_recipe_keeps_its_operands() -> None:
    outputs: list[torch.Tensor] = []

    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        outputs.append((x * 1).add(w))  # saved by nobody, and kept by the user
        return outputs[0].sum()

    module = make(body, ("add", Recompute()))
    before = in_use_bytes()
    loss = module(leaf(), leaf())
    assert round((in_use_bytes() - before) / MIB, 1) == 1 + 2, "the leaves, and the result"
    del loss
    outputs.clear()
    assert in_use_bytes() == before


def test_graph_when_dropped_then_all_of_it_is_freed() -> None:
    before = in_use_bytes()
    host = get_runtime().current_swapper().scheduler.stats().host_bytes
    inputs = leaf(), leaf()
    out = make(gated, ("silu", Swap()), ("mul", Recompute()))(*inputs)
    del out, inputs
    assert in_use_bytes() == before
    assert get_runtime().current_swapper().scheduler.stats().host_bytes == host
    assert get_runtime().shim.marks_count() == 0


def test_result_when_two_use_it_and_only_one_runs_back_then_its_bytes_go_when_that_ends() -> None:
    x, w = leaf(), leaf()

    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        made = x + w
        return made.sin(), made.cos()

    first, second = make(body, ("add", Recompute()))(x, w)
    one, other = first.sum(), second.sum()
    del first, second
    before = in_use_bytes()
    torch.autograd.grad(one, x, retain_graph=True)
    assert in_use_bytes() == before
    torch.autograd.grad(one + other, x)


# ---- a swap whose consumer is recomputed ---------------------------------------------------------


def squared(x: torch.Tensor, w: torch.Tensor) -> Any:
    made = x.exp()
    return (made * made).sin() + w  # saves it twice


def with_region(x: torch.Tensor, w: torch.Tensor) -> Any:
    return swapkit.checkpoint(lambda value: value.sin() * w)(x.exp() + 1)


SWAPPED = ("exp|add", Swap())


@pytest.mark.parametrize(
    ("body", "consumer", "kept", "repeated"),
    [
        (lambda x, w: (x.exp() * w).sin(), ("mul", Recompute()), 1, 1),
        (squared, ("mul", Recompute()), 1, 1),
    ],
    ids=["saved once", "saved twice"],
)
@pytest.mark.promise("B13")
def test_swap_when_its_consumer_is_recomputed_then_nothing_moves_and_without_it_does(
    body: Any, consumer: tuple[str, What], kept: float, repeated: int
) -> None:
    swap = ("exp", Swap())
    assert cost(make(body, swap, consumer), leaf(), leaf()) == Cost(kept, 0, repeated)
    assert cost(make(body, swap), leaf(), leaf()).moved == 1


@pytest.mark.promise("B13")
def test_swap_when_a_late_consumer_is_recomputed_then_void_for_all_results_and_shown() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        made = x.exp()
        early = made.sin().tanh().sigmoid()  # saves it, and it is sent before `mul` is seen
        return early + (made * w).cos() + w.exp().sin()  # the second result has no such consumer

    module = make(body, ("exp", Swap()), ("mul", Recompute()))
    inputs = leaf(), leaf()
    assert cost(module, *inputs).moved > 0  # nothing is known of the operators to come
    assert cost(module, *inputs).moved == 0
    swapped, _ = swapkit.choices(module)
    assert (swapped.where, swapped.holds) == ("exp", False)
    assert swapped.reason == "a recomputed operator needs its results"
    alone = make(body, ("exp", Swap()))
    assert cost(alone, *inputs).moved == 2
    assert [row.holds for row in swapkit.choices(alone)] == [True]


@pytest.mark.promise("B13")
def test_swap_when_its_consumer_is_a_recomputed_region_then_nothing_moves() -> None:
    def plain(x: torch.Tensor, w: torch.Tensor) -> Any:
        return (x + 1).sin() * w

    def region(x: torch.Tensor, w: torch.Tensor) -> Any:
        return inner(x + 1, w)

    inner = swapkit.checkpoint(lambda value, w: value.sin() * w)
    swap = ("add", Swap())
    assert cost(make(plain, swap), leaf(), leaf()).moved == 1
    assert cost(make(region, swap), leaf(), leaf()).moved == 0


def test_region_when_its_input_is_not_swapped_for_a_configuration_then_a_budget_may_move_it() -> (
    None
):
    inner = swapkit.checkpoint(Calls(lambda x: x.sin().exp()))
    outer = Calls(lambda x: inner(x * 2))
    make_part(outer).add(Choice(source=Source.CONFIGURATION, what=Swap()))
    with swapkit.budget("1GiB") as session:
        out = outer(leaf())
        before = in_use_bytes()
        session.rescue(1 << 40)
        assert before - in_use_bytes() >= MIB
        out.sum().backward()


# ---- scopes around -------------------------------------------------------------------------------


def test_swap_when_a_scope_around_keeps_then_nothing_moves_but_recomputation_may_go_on() -> None:
    chosen = ("silu", Swap()), ("mul", Recompute())
    with swapkit.keep():
        # The swap of what mul needs would be void anyway.
        assert cost(make(gated, *chosen), leaf(), leaf()) == Cost(1, 0, 1)
        assert cost(make(gated, ("silu", Swap())), leaf(), leaf()) == Cost(2, 0, 0)


def test_scope_that_swaps_when_around_then_a_void_swap_is_the_scopes_again() -> None:
    module = make(lambda x, w: (x.exp() * w).sin().cos(), ("exp", Swap()), ("mul", Recompute()))
    with swapkit.offload():  # in which backward begins where `cos` has saved the result of `sin`
        assert cost(module, leaf(), leaf()).moved == 1


def test_operands_of_recipes_when_a_budget_needs_their_memory_then_evicted_and_brought_back(
    installation: Installation,
) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        return ((x @ w) + 1).sin()  # only the recipe keeps the product

    x, w = leaf(), leaf()
    expected = torch.autograd.grad(Calls(body)(x, w).sum(), (x, w))
    with swapkit.budget(limit_above_reserved(installation, 16 * MIB)) as session:
        loss = make(body, ("add", Recompute()))(x, w).sum()
        assert session.rescue(1 << 40) >= MIB
        grads = torch.autograd.grad(loss, (x, w))
    assert all(map(torch.equal, grads, expected))
    assert session.stats.recomputed_regions == 1
    assert session.stats.swapped_in_bytes >= MIB
