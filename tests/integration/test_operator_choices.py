"""Choices for single operators give the bits of plain training.

Of the operators of one module; the programs of the suite are run in `tests/conformance`, what is
kept, moved and computed again is counted in `test_operator_memory.py`.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit._runtime.user_choices.wrapping import make_part
from swapkit.errors import SavedTensorModified
from swapkit.registry import Recompute, Swap
from tests.programs import SIDE, assert_same_bits, leaf
from tests.support.operators import Calls, choose, hidden_layer, recomputed, train
from tests.support.threads import on_thread, on_threads

if TYPE_CHECKING:
    from tests.support.operators import Body


@pytest.fixture(autouse=True)
def _installed() -> None:
    swapkit.install()


# ---- single operators ----------------------------------------------------------------------------


def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    query, key, value = ((x * scale).view(1, 4, SIDE, SIDE // 4) for scale in (1, 2, 3))
    return F.scaled_dot_product_attention(query, key, value).reshape(SIDE, SIDE) @ w


def cast(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.gelu(x @ w) @ w


def split(x: torch.Tensor, w: torch.Tensor) -> Any:
    first, second = (x * w).exp().split(SIDE // 2, 1)
    return first.t() @ second.contiguous() + first.view(torch.int32).shape[0]


def seen_as_other_dtype(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = (x * 2).sigmoid()
    return torch.view_as_real(torch.view_as_complex(made.view(SIDE, SIDE // 2, 2)) ** 2).mul(
        w.view(SIDE, SIDE // 2, 2)
    )


def scalars(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sum() * 2).sin() * w * (w.mean() * 3.5).cos()


def conjugates(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((torch.complex(x, w) * 2).conj() * torch.complex(w, x)).imag


OPERATORS: dict[str, tuple[str, Body]] = {
    "chain": ("silu|mul", lambda x, w: (F.silu(x * 1) * (w * 1)) @ x),
    "native_dropout": (
        "native_dropout",
        lambda x, w: torch.native_dropout(x * 1, 0.3, True)[0] @ w,
    ),
    "rand": ("rand|mul", lambda x, w: (x * torch.rand(SIDE, SIDE)).exp() * w),
    "layer_norm": ("layer_norm", lambda x, w: F.layer_norm(x * 1, [SIDE], w[0], w[1]) @ w),
    "attention": ("flash_attention", attend),
    "topk": ("topk", lambda x, w: (x * 1).topk(SIDE // 2, 1)[0].exp() * w[:, : SIDE // 2]),
    "max": ("max", lambda x, w: (x * 1).unfold(1, 2, 1).max(2)[0].exp() * w[:, 1:]),
    "split": ("exp", split),
    "expand": ("exp", lambda x, w: (x * 2).exp().expand(3, SIDE, SIDE) * w),
    "other dtype": ("sigmoid", seen_as_other_dtype),
    "complex": ("mul|complex", conjugates),
    "autocast": ("mm", cast),
    "no dimensions": (".*", scalars),
    "cross entropy": ("log_softmax", lambda x, w: F.cross_entropy(x * w, torch.arange(SIDE))),
    "operator of the caller's": ("sort", lambda x, w: (x * w).sort(1).values.exp() * w),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_when_recomputed_then_same_bits_and_random_numbers_stay_in_step(name: str) -> None:
    pattern, body = OPERATORS[name]
    expected = train(Calls(body))
    before = recomputed()
    assert_same_bits(train(choose(Calls(body), {pattern: Recompute()})), expected)
    assert recomputed() > before


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_when_swapped_then_same_bits(name: str) -> None:
    pattern, body = OPERATORS[name]
    expected = train(Calls(body))
    assert_same_bits(train(choose(Calls(body), {pattern: Swap(prefetch=1)})), expected)


def test_generator_of_the_users_when_drawn_from_then_its_operator_is_not_recomputed() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        mask = torch.bernoulli(torch.full((SIDE, SIDE), 0.5), generator=generator)
        generator.manual_seed(6)
        return (x * mask).exp() * w

    expected = train(Calls(body))
    assert_same_bits(train(choose(Calls(body), {"bernoulli": Recompute()})), expected)


# ---- in place ------------------------------------------------------------------------------------


def changes_operand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x * 1
    made = hidden + w  # needs neither in backward
    loss = made.sin()
    hidden.mul_(2)
    return loss + hidden


def changes_operand_of_dead_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x * 1
    loss = (hidden + w).sin()
    hidden.mul_(2)
    return loss + hidden


def changes_before_the_save(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x * 1
    made = hidden + w
    hidden.zero_()
    return made.sin()


def changes_result_unseen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = x + w
    made.data.mul_(3)  # leaves the version as it was
    return made.sin()


IN_PLACE: dict[str, Body] = {
    "operand": changes_operand,
    "operand of a dead result": changes_operand_of_dead_result,
    "before the save": changes_before_the_save,
    "result, unseen": changes_result_unseen,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_change_in_place_when_plain_autograd_would_not_mind_then_same_bits(name: str) -> None:
    expected = train(Calls(IN_PLACE[name]))
    assert_same_bits(train(choose(Calls(IN_PLACE[name]), {"add": Recompute()})), expected)


def test_operand_when_changed_outside_the_module_then_same_bits() -> None:
    def gradient(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(5)
        x = leaf()
        hidden = x * 1
        made = model(hidden)
        hidden.mul_(2)
        return torch.autograd.grad(made.sum(), x)[0]

    expected = gradient(Calls(lambda value: (value + 1).sin()))
    model = choose(Calls(lambda value: (value + 1).sin()), {"add": Recompute()})
    assert_same_bits([gradient(model)], [expected])


def test_result_when_changed_after_it_was_saved_then_refused() -> None:
    kept: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        kept.append(x + 1)
        return kept[0].sin()

    loss = choose(Calls(body), {"add": Recompute()})(leaf()).sum()
    kept[0].mul_(2)
    with pytest.raises(SavedTensorModified, match="modified by an inplace operation"):
        loss.backward()


class Spoiled(torch.autograd.Function):
    """Changes in backward what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.saved_tensors[0].zero_()
        return grad


def test_result_when_backward_changes_what_it_was_given_then_refused_as_in_plain_autograd() -> None:
    x = leaf()

    def body(x: torch.Tensor) -> Any:
        made = x + 1
        return made.sin() + Spoiled.apply(made)  # whose backward runs first

    for model in (Calls(body), choose(Calls(body), {"add": Recompute()})):
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)


# ---- graphs and threads --------------------------------------------------------------------------


def test_graph_when_walked_twice_in_parts_and_by_double_backward_then_same_bits() -> None:
    def walk(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(4)
        x, w = leaf(), leaf()
        out = model(x, w)
        parts = [
            torch.autograd.grad(out.sum(), source, retain_graph=True)[0] for source in (x, w, x)
        ]
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return [*parts, *torch.autograd.grad((first * first).sum(), (x, w))]

    expected = walk(Calls(hidden_layer))
    assert_same_bits(walk(choose(Calls(hidden_layer), {".*": Recompute()})), expected)


def test_graphs_when_in_flight_on_several_threads_then_same_bits_and_no_marks_left() -> None:
    model = Calls(hidden_layer)
    expected = [train_seeded(model, seed) for seed in range(8)]
    choose(model, {"mm|mul": Recompute(), "exp|tanh": Swap()})
    results: dict[int, list[torch.Tensor]] = {}

    def work(seeds: range) -> None:
        for _ in range(5):
            results.update({seed: train_seeded(model, seed) for seed in seeds})

    on_threads(*[partial(work, range(i, 8, 2)) for i in range(2)])
    for seed, result in results.items():
        assert_same_bits(result, expected[seed])
    gc.collect()
    assert get_runtime().shim.marks_count() == 0


def train_seeded(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(SIDE, SIDE, generator=generator).requires_grad_() for _ in range(2))
    first, second = model(x, w), model(w, x)
    return [
        *torch.autograd.grad(second.sum(), (x, w)),
        *torch.autograd.grad(first.sum(), (x, w)),
    ]


def test_backward_when_on_another_thread_then_same_bits() -> None:
    model = Calls(hidden_layer)
    torch.manual_seed(2)
    x, w = leaf(), leaf()
    expected = torch.autograd.grad(model(x, w).sum(), (x, w))
    loss = choose(model, {".*": Recompute()})(x, w).sum()
    results = on_thread(lambda: torch.autograd.grad(loss, (x, w)))
    assert_same_bits(list(results), list(expected))


# ---- modules -------------------------------------------------------------------------------------


class Nested(nn.Module):
    """A module with operators, around one with others, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIDE, SIDE), Calls(lambda x: (x * 0.5).exp()))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        hidden = self.inner(x * 0.1).tanh()
        return self.inner(hidden * w) * x


def test_modules_when_nested_and_shared_then_each_has_its_own_operators() -> None:
    torch.manual_seed(1)
    model = Nested()
    expected = train(model)
    inner = model.inner[1]
    choose(inner, {"exp": Recompute()}, model)
    choose(model, {"mul": Recompute(), "tanh": Swap()}, model)
    before = recomputed()
    assert_same_bits(train(model), expected)
    part, outer = make_part(inner).operators, make_part(model).operators
    assert part is not None
    assert outer is not None
    assert list(part.seen.values()) == [2]
    assert sorted(outer.seen.values()) == [1, 3]
    assert recomputed() - before == 2 + 2, "exp of both calls, and those products that were saved"


class Recursive(nn.Module):
    """A module that calls itself."""

    def forward(self, x: torch.Tensor, w: torch.Tensor, depth: int = 3) -> Any:
        made = (x * w).exp() * 0.01
        return made if depth == 0 else self(made, w, depth - 1)


def test_module_when_it_calls_itself_then_same_bits() -> None:
    expected = train(Recursive())
    model = choose(Recursive(), {"exp": Recompute(), "mul": Swap()})
    assert_same_bits(train(model), expected)
    operators = make_part(model).operators
    assert operators is not None
    assert list(operators.seen.values()) == [4, 8]


def test_forward_when_it_raises_then_the_next_one_works_and_no_mode_is_left() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = (x * w).exp()
        if w.shape[0] == 1:
            raise ValueError
        return made * w

    model = choose(Calls(body), {"exp": Recompute(), "mul": Swap()})
    expected = train(Calls(body))
    with pytest.raises(ValueError, match=r"^$"):
        model(leaf(), leaf(1, SIDE))
    assert len(mode_stack()) == 0
    assert_same_bits(train(model), expected)
