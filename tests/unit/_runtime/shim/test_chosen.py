"""One chosen operator again: the same bits, as often as somebody needs it, and never wrongly."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import SavedTensorModified
from tests.support import MIB
from tests.support.captured import capture, choosing, is_captured, pack, unpack
from tests.support.threads import on_threads

aten: Any = torch.ops.aten
SIDE = 32
pytestmark = pytest.mark.usefixtures("installation")


def numbers(side: int = SIDE) -> torch.Tensor:
    return torch.rand(side, side, generator=torch.Generator().manual_seed(0))


def repeats() -> int:
    return get_runtime().current_swapper().counters().recomputed


def in_use_bytes() -> int:
    gc.collect()
    return swapkit.memory_stats()["allocated_bytes.all.current"]


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
        (aten.unbind_copy.int, (numbers()[:4],)),
        (aten.rand.default, ([SIDE, SIDE],)),
        (aten.convolution.default, (numbers().view(1, 1, SIDE, SIDE), torch.ones(2, 1, 3, 3), None,
                                    [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)  # fmt: skip
def test_operator_when_repeated_then_same_results_and_random_numbers_go_on(
    function: Any, args: Any
) -> None:
    torch.manual_seed(1)
    packed, made = capture(function, *args)
    before = repeats()
    state = torch.get_rng_state()
    again = [unpack(each) for each in packed]
    assert torch.equal(torch.get_rng_state(), state)
    assert repeats() == before + 1, "once for all of its results"
    for one, other in zip(again, made, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.data_ptr() != other.data_ptr()


def test_parameter_when_its_data_is_replaced_then_the_former_is_used() -> None:
    weight = torch.nn.Parameter(numbers())
    (packed,), (made,) = capture(aten.mul.Tensor, weight, 2.0)
    weight.data = torch.zeros(SIDE, SIDE)
    assert torch.equal(unpack(packed), made)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[3:7, ::2],
        lambda t: t[:1].expand(5, SIDE),
        lambda t: t.view(torch.int32),
        lambda t: torch.view_as_complex(t.view(SIDE, -1, 2)).conj(),
        lambda t: t.as_strided((3, 3), (2, 1), 5),
    ],
)
def test_view_of_a_result_when_unpacked_then_the_same_view(view: Any) -> None:
    with choosing("mul"):
        expected = view(numbers() * 2.0)
        packed = pack(expected)
    assert is_captured(packed)
    again = unpack(packed)
    assert torch.equal(again, expected)
    assert (again.stride(), again.storage_offset()) == (
        expected.stride(),
        expected.storage_offset(),
    )
    assert (again.dtype, again.is_conj()) == (expected.dtype, expected.is_conj())


# ---- changes -------------------------------------------------------------------------------------


def test_operand_when_changed_unseen_then_refused_with_what_to_do() -> None:
    operand = numbers()
    (packed,), _ = capture(aten.mul.Tensor, operand, 2.0)
    torch._C._autograd._unsafe_set_version_counter((operand,), (1,))
    with pytest.raises(SavedTensorModified, match=r"operand of aten.mul.Tensor.*choose another"):
        unpack(packed)


def test_operand_when_its_memory_is_gone_then_refused_with_what_to_do() -> None:
    operand = numbers()
    (packed,), _ = capture(aten.mul.Tensor, operand, 2.0)
    operand.untyped_storage().resize_(0)  # as FSDP does
    with pytest.raises(SavedTensorModified, match=r"operand of aten.mul.Tensor.* has no memory"):
        unpack(packed)


@pytest.mark.parametrize("is_seen", [True, False])
def test_operand_when_changed_before_the_save_then_the_result_itself_is_kept(
    is_seen: bool,
) -> None:
    operand = numbers()
    with choosing():
        made = operand * 2.0
        if is_seen:
            operand.add_(1)
        else:
            torch._C._autograd._unsafe_set_version_counter((operand,), (1,))
        packed = pack(made)
        assert not is_captured(packed)
        assert torch.equal(unpack(packed), made)


def test_operand_when_a_computed_one_was_changed_then_the_result_itself_is_kept() -> None:
    with choosing():
        middle = numbers() * 2.0
        made = middle.exp()
        assert is_captured(pack(made))
        middle.add_(1)
        assert not is_captured(pack(made))


@pytest.mark.parametrize("is_alive", [True, False])
def test_result_when_an_operand_is_about_to_change_then_it_is_kept(is_alive: bool) -> None:
    operand = numbers()
    with choosing():
        made = list(operand.max(1))
        values = made[0].clone()
        packed = pack(made[0])
    if not is_alive:
        made.clear()
    before = repeats()
    operand.zero_()
    assert repeats() - before == (0 if is_alive else 1)
    assert torch.equal(unpack(packed), values)


def test_operand_when_a_users_operator_changes_it_then_the_result_is_kept() -> None:
    library = torch.library.Library("swapkit_chosen", "FRAGMENT")
    library.define("clear(Tensor(a!) x) -> ()")
    library.impl("clear", lambda x: (x.zero_(), None)[1], "CPU")
    try:
        operand = numbers()
        (packed,), (made,) = capture(aten.mul.Tensor, operand, 2.0)
        expected = made.clone()
        torch.ops.swapkit_chosen.clear(operand)
        assert torch.equal(unpack(packed), expected)
    finally:
        library._destroy()


def test_result_when_something_else_changes_then_it_is_not_computed_before() -> None:
    operand, other = numbers(), numbers()
    (packed,), _ = capture(aten.mul.Tensor, operand, 2.0)
    other.add_(1)
    before = repeats()
    assert torch.equal(unpack(packed), operand * 2)
    assert repeats() == before + 1


def test_results_when_made_and_settled_on_several_threads_then_each_is_as_it_was() -> None:
    def work() -> None:
        for _ in range(100):
            operand = numbers()
            with choosing():
                made = operand * 2.0
                packed, expected = pack(made), made.clone()
            operand.zero_()
            assert torch.equal(unpack(packed), expected)

    on_threads(*[work] * 4)


# ---- what is kept --------------------------------------------------------------------------------


def test_views_when_used_at_the_same_time_then_they_share_one_storage() -> None:
    with choosing():
        made = numbers() * 2.0
        one, other = pack(made), pack(made.t())
    before = repeats()
    assert unpack(one).data_ptr() == unpack(other).data_ptr()
    assert repeats() == before + 1


def test_operands_when_nobody_saves_the_result_then_let_go_of_with_it_or_with_the_carrier() -> None:
    before = in_use_bytes()
    with choosing("exp"):
        made = numbers(512).exp()
        assert in_use_bytes() - before == 2 * MIB, "the result, and the operand for it"
        del made
        other = torch.ones(2).exp()
        assert in_use_bytes() - before < MIB
        kept = numbers(512).exp()
        assert in_use_bytes() - before >= 2 * MIB
    assert in_use_bytes() - before < MIB + MIB // 2
    assert kept.shape[0] == 512
    assert len(other) == 2


def test_result_when_many_threads_save_and_unpack_then_all_get_the_same_bits() -> None:
    with choosing():
        made = numbers() * 2.0

        def work() -> None:
            for _ in range(50):
                assert torch.equal(unpack(pack(made)), made)

        on_threads(*[work] * 4)


# ---- kernels that torch does not run -------------------------------------------------------------


@pytest.mark.parametrize("is_in_session", [False, True])
def test_operand_when_announced_and_overwritten_then_the_result_is_as_it_was(
    is_in_session: bool,
) -> None:
    def check() -> None:
        operand = numbers()
        (packed,), made = capture(aten.mul.Tensor, operand, 2.0)
        expected = made.pop().clone()
        with swapkit.op("kernel", operand) as kernel:
            operand.numpy()[:] = 0
            kernel.outputs(operand)
        assert torch.equal(unpack(packed), expected)

    if is_in_session:
        with swapkit.budget("512MiB"):
            check()
    else:
        check()


def test_operand_when_named_after_it_was_overwritten_then_an_error_and_no_result() -> None:
    operand = numbers()
    (packed,), made = capture(aten.mul.Tensor, operand, 2.0)
    made.clear()
    with swapkit.op("kernel") as kernel:
        operand.numpy()[:] = 0
        kernel.outputs(operand)
    with pytest.raises(SavedTensorModified, match=r"aten\.mul.*pass the operand to `swapkit\.op"):
        unpack(packed)


def test_operand_when_named_after_it_was_overwritten_then_a_living_result_is_kept() -> None:
    operand = numbers()
    (packed,), made = capture(aten.mul.Tensor, operand, 2.0)
    expected = made[0].clone()
    with swapkit.op("kernel") as kernel:
        operand.numpy()[:] = 0
        kernel.outputs(operand)
    made.clear()
    assert torch.equal(unpack(packed), expected)


def test_result_when_overwritten_and_only_another_tensor_has_its_memory_then_as_it_is_now() -> None:
    (packed,), made = capture(aten.mul.Tensor, numbers(), 2.0)
    other = made.pop().detach()
    with swapkit.op("kernel", other) as kernel:
        other.numpy()[:] = 0
        kernel.outputs(other)
    assert torch.equal(unpack(packed), torch.zeros(SIDE, SIDE))
