"""One operator again: with the same bits, as often as somebody needs it, and never wrongly."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from swapkit._runtime.recompute import recipes
from swapkit._runtime.recompute.by_storage import ByStorage
from swapkit._runtime.recompute.layouts import layout_of
from swapkit._runtime.recompute.recipes import (
    Call,
    Recipe,
    Recomputed,
    settle_announced,
    settle_changed,
    settle_overwritten,
)
from swapkit._runtime.runtime import get_runtime
from swapkit.errors import RecomputeMismatch, SavedTensorModified
from tests.support.threads import on_threads

aten: Any = torch.ops.aten
SIDE = 32


def numbers() -> torch.Tensor:
    return torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def make(function: Any, *args: Any, **kwargs: Any) -> tuple[Recipe, list[torch.Tensor]]:
    call = Call(function, args, kwargs)
    results = function(*args, **kwargs)
    made = list(results) if isinstance(results, tuple) else [results]
    return Recipe(call, made), made


def pack(recipe: Recipe, tensor: torch.Tensor) -> Recomputed:
    packed = recipe.pack(tensor)
    assert isinstance(packed, Recomputed)
    return packed


def repeats() -> int:
    return get_runtime().current_swapper().recomputed_regions


# ---- repeating -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.mul.Tensor, (numbers(), 2.5)),
        (aten.native_layer_norm.default, (numbers(), [SIDE], None, None, 1e-5)),
        (aten.native_dropout.default, (numbers(), 0.5, True)),
        (aten.topk.default, (numbers(), 3)),
        (aten.max.dim, (numbers(), 1)),
        (aten.cat.default, ([numbers(), numbers()], 1)),
        (aten.rand.default, ([SIDE, SIDE],)),
        (aten.convolution.default, (numbers().view(1, 1, SIDE, SIDE), torch.ones(2, 1, 3, 3), None,
                                    [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)  # fmt: skip
def test_call_when_repeated_then_same_results_and_random_numbers_go_on(
    function: Any, args: Any
) -> None:
    torch.manual_seed(1)
    recipe, made = make(function, *args)
    stand_ins = [pack(recipe, each) for each in made]
    before = repeats()
    state = torch.get_rng_state()
    again = [stand_in.unpack() for stand_in in stand_ins]
    assert torch.equal(torch.get_rng_state(), state)
    assert repeats() == before + len(made), "outside of a backward pass nothing is kept for others"
    for one, other in zip(again, made, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.data_ptr() != other.data_ptr()


def test_parameter_when_its_data_is_replaced_then_the_former_is_used() -> None:
    weight = torch.nn.Parameter(numbers())
    with torch.no_grad():
        recipe, (made,) = make(aten.mul.Tensor, weight, 2.0)
    packed = pack(recipe, made)
    weight.data = torch.zeros(SIDE, SIDE)
    assert torch.equal(packed.unpack(), made)


def test_result_when_it_looks_otherwise_when_repeated_then_refused(monkeypatch: Any) -> None:
    recipe, (made,) = make(aten.mul.Tensor, numbers(), 2.0)
    packed = pack(recipe, made)
    monkeypatch.setattr(Call, "repeat", lambda _call: [torch.ones(3)])
    with pytest.raises(RecomputeMismatch, match=r"aten.mul.Tensor was recomputed to .*\[3\]"):
        packed.unpack()


# ---- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[3:7, ::2],
        lambda t: t[:1].expand(5, SIDE),
        lambda t: t.view(torch.int32),
        lambda t: torch.view_as_complex(t.view(SIDE, -1, 2)),
        lambda t: t.as_strided((3, 3), (2, 1), 5),
    ],
)
def test_view_of_a_result_when_unpacked_then_the_same_view(view: Any) -> None:
    recipe, (made,) = make(aten.mul.Tensor, numbers(), 2.0)
    expected = view(made)
    again = pack(recipe, expected).unpack()
    assert torch.equal(again, expected)
    assert (again.stride(), again.storage_offset()) == (
        expected.stride(),
        expected.storage_offset(),
    )
    assert again.dtype == expected.dtype
    assert layout_of(again) == layout_of(expected)
    assert hash(layout_of(again)) == hash(layout_of(expected))
    assert layout_of(again) != layout_of(made.new_empty(7))


@pytest.mark.parametrize("view", [torch.conj, lambda t: torch.conj(t).imag])
def test_view_when_it_is_lazily_conjugate_then_kept_itself(view: Any) -> None:
    recipe, (made,) = make(aten.mul.Tensor, torch.complex(numbers(), numbers()), 2.0)
    expected = view(made)
    packed = recipe.pack(expected)
    assert not isinstance(packed, Recomputed)
    assert torch.equal(get_runtime().shim.unpack(packed), expected)  # type: ignore[arg-type]


# ---- changes -------------------------------------------------------------------------------------


def test_operand_when_changed_unseen_then_refused_with_what_to_do() -> None:
    operand = numbers()
    recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
    packed = pack(recipe, made)
    operand.add_(1)
    with pytest.raises(SavedTensorModified, match=r"operand of aten.mul.Tensor.*choose another"):
        packed.unpack()


def test_operand_when_its_memory_is_gone_then_refused_with_what_to_do() -> None:
    operand = numbers()
    recipe, results = make(aten.mul.Tensor, operand, 2.0)
    packed = pack(recipe, results.pop())
    operand.untyped_storage().resize_(0)  # as FSDP does
    with pytest.raises(SavedTensorModified, match=r"operand of aten.mul.Tensor.* has no memory"):
        packed.unpack()


def test_operand_when_changed_before_the_save_then_the_result_itself_is_kept() -> None:
    operand = numbers()
    recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
    operand.add_(1)
    packed = recipe.pack(made)
    assert not isinstance(packed, Recomputed)


def test_operand_when_a_recomputed_one_was_changed_then_the_result_itself_is_kept() -> None:
    first, (middle,) = make(aten.mul.Tensor, numbers(), 2.0)
    shim = get_runtime().shim
    shim.mark(middle, recipes._PASS, first, 0)
    second, (made,) = make(aten.exp.default, middle)
    assert isinstance(second.pack(made), Recomputed)
    middle.add_(1)
    assert not isinstance(second.pack(made), Recomputed)


@pytest.mark.parametrize("is_alive", [True, False])
def test_recipe_when_settled_before_its_operand_changes_then_it_keeps_what_is_used(
    is_alive: bool,
) -> None:
    operand = numbers()
    recipe, made = make(aten.max.dim, operand, 1)
    values, indices = (each.clone() for each in made)
    packed = pack(recipe, made[0])
    if not is_alive:
        made.clear()
    before = repeats()
    settle_changed([operand])
    operand.zero_()
    assert repeats() - before == (0 if is_alive else 1)
    assert torch.equal(packed.unpack(), values)
    if is_alive:
        assert not isinstance(recipe.pack(made[1]), Recomputed), "nobody had saved it"
        assert torch.equal(made[1], indices)


def test_recipe_when_something_else_changes_then_it_is_not_settled() -> None:
    operand, other = numbers(), numbers()
    recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
    packed = pack(recipe, made)
    settle_changed([other, torch.eye(3).to_sparse()])
    before = repeats()
    assert torch.equal(packed.unpack(), operand * 2)
    assert repeats() == before + 1


def test_recipes_when_one_operand_changes_then_no_other_recipe_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    touches = Recipe.touches

    def note(recipe: Recipe, storages: Any) -> bool:
        asked.append(recipe)
        return touches(recipe, storages)

    monkeypatch.setattr(Recipe, "touches", note)
    kept = [make(aten.mul.Tensor, numbers(), 2.0) for _ in range(20)]
    operand = numbers()
    first, results = make(aten.mul.Tensor, operand, 2.0)
    second, more = make(aten.exp.default, results[0])
    settle_changed([operand])
    assert asked == [first]
    settle_changed(results)
    assert asked == [first, first, second]
    assert len(kept) == 20
    assert more


def test_recipes_when_made_and_settled_on_several_threads_then_each_is_settled_once() -> None:
    def work() -> None:
        for _ in range(200):
            operand = numbers()
            recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
            packed, expected = pack(recipe, made), made.clone()
            settle_changed([operand])
            operand.zero_()
            assert torch.equal(packed.unpack(), expected)

    on_threads(*[work] * 4)


def test_storages_when_their_recipes_are_gone_then_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: ByStorage[Recipe] = ByStorage()
    monkeypatch.setattr(recipes, "_by_storage", known)
    for _ in range(500):
        make(aten.mul.Tensor, numbers(), 2.0)
        assert len(known) <= 2
    assert len(known) == 0


def test_recipe_when_another_storage_is_where_its_result_was_then_it_is_not_settled() -> None:
    """Torch gives the address of a storage that is gone to another one."""
    recipe, results = make(aten.exp.default, numbers())
    stand_in = pack(recipe, results[0])
    expected = results[0].clone()
    results.clear()
    before = repeats()
    for _ in range(100):
        settle_changed([torch.ones(SIDE) for _ in range(10)])
    assert repeats() == before
    assert stand_in.unpack().equal(expected)


def test_result_when_what_was_given_out_is_changed_then_the_next_is_refused() -> None:
    recipe, (made,) = make(aten.mul.Tensor, numbers(), 2.0)
    one, other = pack(recipe, made), pack(recipe, made)
    one.unpack().add_(1)
    with pytest.raises(SavedTensorModified, match="version 1; expected version 0"):
        one.unpack()
    assert torch.equal(other.unpack(), made), "computed again: what is there was changed"


# ---- what is kept --------------------------------------------------------------------------------


def test_stand_ins_when_used_at_the_same_time_then_they_share_one_storage() -> None:
    recipe, (made,) = make(aten.mul.Tensor, numbers(), 2.0)
    one, other = pack(recipe, made), pack(recipe, made.t())
    before = repeats()
    first = one.unpack()
    second = other.unpack()
    assert first.data_ptr() == second.data_ptr()
    assert repeats() == before + 1
    reference = weakref.ref(first.untyped_storage())
    del first, second
    gc.collect()
    assert reference() is None


def test_recipe_when_forgotten_or_its_results_are_gone_then_it_goes() -> None:
    for forget in (True, False):
        operand = numbers()
        recipe, made = make(aten.mul.Tensor, operand, 2.0)
        reference = weakref.ref(recipe)
        if forget:
            recipe.forget()
        del recipe
        assert (reference() is None) == forget
        made.clear()
        gc.collect()
        assert reference() is None


def test_recipe_when_many_threads_save_and_unpack_then_all_get_the_same_bits() -> None:
    recipe, (made,) = make(aten.mul.Tensor, numbers(), 2.0)

    def work() -> None:
        for _ in range(50):
            assert torch.equal(pack(recipe, made).unpack(), made)

    on_threads(*[work] * 4)


# ---- kernels that torch does not run -------------------------------------------------------------


def test_operand_when_announced_and_overwritten_then_a_chosen_result_is_as_it_was() -> None:
    operand = numbers()
    recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
    packed, expected = pack(recipe, made), made.clone()
    del made
    settle_announced([operand])
    operand.data.zero_()
    settle_overwritten([operand])
    assert torch.equal(packed.unpack(), expected)


def test_operand_when_named_after_it_was_overwritten_then_an_error_and_no_result() -> None:
    operand = numbers()
    recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
    packed = pack(recipe, made)
    del made
    operand.data.zero_()
    settle_overwritten([operand])
    assert not packed.is_intact
    with pytest.raises(SavedTensorModified, match=r"aten\.mul.*give it to `swapkit\.op"):
        packed.unpack()


def test_operand_when_named_after_it_was_overwritten_then_a_living_result_is_kept() -> None:
    operand = numbers()
    recipe, (made,) = make(aten.mul.Tensor, operand, 2.0)
    packed, expected = pack(recipe, made), made.clone()
    operand.data.zero_()
    settle_overwritten([operand])
    del made
    assert torch.equal(packed.unpack(), expected)


def test_result_when_overwritten_and_only_another_tensor_has_its_memory_then_as_it_is_now() -> None:
    recipe, (made,) = make(aten.mul.Tensor, numbers(), 2.0)
    packed, other = pack(recipe, made), made.detach()
    del made
    other.data.zero_()
    settle_overwritten([other])
    assert torch.equal(packed.unpack(), torch.zeros(SIDE, SIDE))
