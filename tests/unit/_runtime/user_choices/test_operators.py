"""Marks: found by storage and version, gone with the storage; swaps that wait for an operator."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from swapkit._native.sched import State
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.user_choices.operator_choices import (
    ChosenOperators,
    carrying,
    choices_for_operator,
    mark_operators,
)
from swapkit._runtime.user_choices.wrapping import carry_marks, make_part
from swapkit.ir.plans import Action
from swapkit.registry import Choice, Exclude, Recompute, Source, Swap
from tests.support.captured import choosing, is_captured, pack
from tests.support.threads import on_thread
from tests.unit._runtime.rig import AUTO, KEEP, SWAP, group_of, make_swapper, numbers, state_of

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit.registry import What

KIB = 1 << 10
PASS = Placement(Action.PASS)
aten: Any = torch.ops.aten
pytestmark = pytest.mark.usefixtures("installation")


def row(operator: str, what: What, meaning: str = "") -> Choice:
    return Choice(source=Source.CONFIGURATION, what=what, operator=operator, meaning=meaning)


def mark(tensor: torch.Tensor, choice: Placement = SWAP, changes: int = 0) -> bool:
    return get_runtime().shim.mark(tensor, choice, changes)


def saved(swapper: Any, tensor: torch.Tensor, choice: Placement = PASS) -> Any:
    with torch.no_grad():
        return swapper.packer(choice)(tensor)


def is_moved(handle: Any) -> bool:
    """Return whether it was sent, though the test still has the tensor."""
    if handle.group is None:
        return False
    handle.group.mover.release_done(True)
    return state_of(handle) is not State.RESIDENT


# ---- the table -----------------------------------------------------------------------------------


def test_mark_when_its_storage_is_gone_then_swept_whoever_comes_to_its_address() -> None:
    shim = get_runtime().shim
    gc.collect()
    assert shim.marks_count() == 0
    for _ in range(200):
        assert mark(numbers(4 * KIB))
    kept = numbers(4 * KIB)
    mark(kept)
    mark(kept)
    assert shim.marks_count() == 1
    assert shim.has_marks()
    del kept
    assert shim.marks_count() == 0
    assert not shim.has_marks()


def test_mark_when_a_tensor_has_no_plain_memory_then_refused_and_harmless() -> None:
    shim = get_runtime().shim
    own: torch.Tensor = torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {}))
    for tensor in (torch.eye(3).to_sparse(), torch.empty(0), own):
        assert not mark(tensor)
    with torch.inference_mode():
        assert not mark(torch.ones(8))
    with pytest.raises(AttributeError, match="action"):
        shim.mark(torch.ones(8), "swap", 0)  # type: ignore[arg-type]
    assert shim.marks_count() == 0


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        (lambda t: t, True),
        (lambda t: t.view(32, -1).t(), True),
        (lambda t: t.detach(), True),
        (lambda t: t.add_(1), False),
        (lambda t: t.clone(), False),
    ],
    ids=["itself", "view", "detached", "changed", "copy"],
)
def test_tensor_when_saved_then_its_mark_is_found_by_storage_and_version(
    change: Any, is_found: bool
) -> None:
    swapper = make_swapper()
    tensor = numbers(64 * KIB)
    mark(tensor)
    assert is_moved(saved(swapper, change(tensor))) == is_found


def test_mark_when_it_counts_a_change_to_come_then_found_only_after_it() -> None:
    swapper = make_swapper()
    tensor = numbers(64 * KIB)
    mark(tensor, changes=1)
    assert not is_moved(saved(swapper, tensor))
    tensor.add_(1)
    assert is_moved(saved(swapper, tensor))


@pytest.mark.parametrize(("choice", "moves"), [(PASS, True), (AUTO, True), (KEEP, False)])
def test_marked_tensor_when_saved_in_a_scope_then_only_one_that_keeps_stops_it(
    choice: Placement, moves: bool
) -> None:
    swapper = make_swapper()
    tensor = numbers(64 * KIB)
    mark(tensor)
    assert is_moved(saved(swapper, tensor, choice)) == moves


def test_mark_when_it_moves_only_larger_storages_then_a_smaller_one_stays() -> None:
    swapper = make_swapper()
    small, large = numbers(64 * KIB), numbers(256 * KIB)
    for tensor in (small, large):
        mark(tensor, SWAP._replace(min_bytes=128 * KIB))
    assert not is_moved(saved(swapper, small))
    assert is_moved(saved(swapper, large))


@pytest.mark.parametrize("wrong", [None, 3, object()])
def test_unpack_when_given_what_is_no_saved_tensor_then_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a SavedTensor"):
        make_swapper().unpack(wrong)


# ---- swaps that wait -----------------------------------------------------------------------------


def test_swap_when_operators_are_seen_then_sent_at_the_next_chosen_one_or_at_the_end() -> None:
    swapper = make_swapper()
    first, second = numbers(64 * KIB), numbers(64 * KIB)
    mark(first)
    mark(second)
    with choosing("exp|sin"), choosing("exp"):
        one = saved(swapper, first)
        again = saved(swapper, first.view(2, -1))
        assert group_of(one) is group_of(again)
        assert not is_moved(one)
        numbers(4 * KIB).cos()
        assert not is_moved(one), "not chosen"
        numbers(4 * KIB).exp()
        assert is_moved(one)
        other = saved(swapper, second)
        assert not is_moved(other)
    assert is_moved(other)


def test_swap_when_two_nodes_were_made_since_then_sent_where_something_else_is_saved() -> None:
    swapper = make_swapper()
    first = numbers(64 * KIB)
    mark(first)
    x = torch.ones(2, requires_grad=True)
    with choosing("exp"):
        one = saved(swapper, first)
        x.sin()
        assert not is_moved(one), "what is saved now may be this one's operand"
        x.sin()
        assert is_moved(one)


@pytest.mark.parametrize(("base", "moves"), [(PASS, False), (AUTO, False), (SWAP, True)])
def test_swap_when_void_then_the_scope_around_decides(base: Placement, moves: bool) -> None:
    shim, swapper = get_runtime().shim, make_swapper()
    tensor = numbers(64 * KIB)
    mark(tensor, Placement(Action.SWAP, prefetch=3))
    with choosing("exp"):
        handle = saved(swapper, tensor, base)
        shim.void_swaps([numbers(4 * KIB), tensor.view(2, -1)])
    assert is_moved(handle) == moves
    assert group_of(handle).placement.prefetch is None
    later = saved(swapper, tensor, base)
    assert is_moved(later) == moves
    assert shim.marks_count() == 0


def test_void_swaps_when_given_what_are_no_tensors_then_an_error() -> None:
    with pytest.raises(TypeError, match="expected a sequence of tensors"):
        get_runtime().shim.void_swaps(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        get_runtime().shim.mark()  # type: ignore[call-arg]


# ---- rows ----------------------------------------------------------------------------------------


def test_rows_when_an_operator_is_looked_up_then_by_all_its_names_and_judged_together() -> None:
    chosen = (row("mul", Swap(prefetch=1)), row("matmul", Recompute()), row("norm", Swap(), ".*"))
    rows = ChosenOperators((*chosen, row("mul", Exclude())))
    found = rows.judged(aten.mul_.Tensor)
    assert found is not None
    assert found.swap == Swap()
    product = rows.judged(aten.addmm.default)
    assert product is not None
    assert product.recompute == Recompute()
    assert product.swap is None
    assert ChosenOperators((row("mul", Swap()),)).judged(aten.exp.default) is None
    x = torch.ones(4, 4)
    with mark_operators(rows):
        x.mul_(2)
        torch.addmm(x, x, x)
    assert [rows.seen[each] for each in chosen] == [1, 1, 2]


def test_rows_when_an_operator_is_defined_later_then_they_are_for_it_too() -> None:
    rows = ChosenOperators((row("later|exp", Recompute()),))
    x = torch.ones(2)
    with mark_operators(rows):
        x.exp()
    library = torch.library.Library("swapkit_marking", "FRAGMENT")
    try:
        library.define("later(Tensor x) -> Tensor")
        library.impl("later", torch.clone, "CPU")
        with mark_operators(rows):
            torch.ops.swapkit_marking.later(x).exp()
    finally:
        library._destroy()
    assert list(rows.seen.values()) == [3]


class Outer(nn.Module):
    """Asks for rows by name, in itself and around another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.found: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(choices_for_operator("PipeExpert"))
        self.inner.register_forward_pre_hook(
            lambda *_: self.found.append(choices_for_operator("PipeExpert"))
        )
        self.found.append(choices_for_operator("Other"))
        result: torch.Tensor = self.inner(x)
        return result


def test_operators_when_they_run_on_another_thread_then_none_is_chosen() -> None:
    rows = ChosenOperators((row("exp", Recompute()),))
    with mark_operators(rows):
        on_thread(lambda: torch.ones(2).exp())
    assert list(rows.seen.values()) == [0]


def test_rows_for_a_function_when_asked_for_then_only_in_the_modules_own_forward() -> None:
    model = Outer()
    make_part(model).add(row("PipeExpert", Recompute()))
    carry_marks(model)
    model(torch.ones(2))
    own, other, inside = model.found
    assert own == (Choice(source=Source.CONFIGURATION, what=Recompute()),)
    assert other == inside == ()
    assert choices_for_operator("PipeExpert") == ()


# ---- where they hold -----------------------------------------------------------------------------


def test_choice_when_gradients_are_off_or_others_hooks_are_there_then_it_does_not_hold() -> None:
    x = numbers(64 * KIB)
    with torch.no_grad(), choosing() as rows:
        assert not is_captured(pack(x + 1))
        assert sum(rows.seen.values()) == 0
    with torch.autograd.graph.save_on_cpu(), choosing():
        assert not is_captured(pack(x + 1))
    with choosing():
        assert is_captured(pack(x + 1))
        with torch.no_grad():
            assert not is_captured(pack(x + 1))
        with torch.autograd.graph.save_on_cpu():
            assert not is_captured(pack(x + 1))
    assert not is_captured(pack(x + 1))


def test_choosing_when_it_ends_out_of_order_or_is_forgotten_then_nothing_holds_any_more() -> None:
    runtime = get_runtime()
    choices = ChosenOperators((row(".*", Recompute()),)).table()
    one, other = (runtime.shim.choosing(choices, runtime.tracker, True) for _ in range(2))
    one.__enter__()
    with pytest.raises(RuntimeError, match="already entered"):
        one.__enter__()
    other.__enter__()
    assert other.runs()
    assert not one.runs()
    one.__exit__(None, None, None)
    assert other.runs()
    del other
    torch.ones(2).exp()
    assert choices.seen() == [(0, 0)] * len(choices.seen())


def test_marks_when_another_thread_saves_then_its_swaps_do_not_wait_for_this_one() -> None:
    swapper = make_swapper()
    tensor = numbers(64 * KIB)
    mark(tensor)
    with choosing("exp"):
        assert is_moved(on_thread(lambda: saved(swapper, tensor)))


def test_carrier_when_it_ends_then_what_it_made_is_no_longer_found() -> None:
    x = torch.rand(64, 64, requires_grad=True)
    with carrying():
        with mark_operators(ChosenOperators((row("add", Recompute()),))):
            made = x + 1
        assert isinstance((made * made).grad_fn, torch.autograd.graph.Node)
        assert is_captured(pack(made))
    assert not is_captured(pack(made))


def test_parts_when_no_row_for_an_operator_is_left_then_the_module_is_as_before(
    installation: Installation,
) -> None:
    assert installation is not None
    model = nn.Sequential(nn.Linear(8, 8))
    chosen = row("addmm", Swap())
    make_part(model[0]).add(chosen)
    carry_marks(model)
    assert "forward" in vars(model)
    make_part(model[0]).remove(chosen)
    carry_marks(model)
    assert "forward" not in vars(model)
