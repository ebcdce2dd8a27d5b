"""Operators that a plan names: captured as they ran, computed again to the same bits, let go of."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import swapkit
from swapkit._runtime.operators.settings import ThreadSettings
from swapkit._runtime.process.captures import find_operator, see
from swapkit.errors import PlanMismatch, SavedTensorModified
from swapkit.ir.traces import BEFORE
from tests.unit._runtime.plan_rig import (
    WIDTH,
    Apply,
    Course,
    Twice,
    assert_same,
    follow,
    made_by,
    plain,
    recompute,
    repeat_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit.ir.plans import Decision
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


class Channels(nn.Module):
    """A norm over the middle one of three dimensions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x.view(4, -1, WIDTH).transpose(1, 2))
        return y.transpose(1, 2).reshape(x.shape)


# ---- what is captured ----------------------------------------------------------------------------


def lower(x: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.bfloat16) * 2).float().sin()


def pieces(x: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x.sin(), x.cos()])
    some = torch.stack([each.exp() for each in both.chunk(4)])
    return some[:, torch.arange(3)].tanh()[..., None, :].sin()


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(4, -1, 4, WIDTH // 4).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads.sin(), heads, is_causal=True)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x.sin(), 0.5) * functional.rrelu(x, training=True)


def conjugate(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real((torch.view_as_complex(x.view(-1, WIDTH // 2, 2)) * 1j).conj() * 2j)


def spread(x: torch.Tensor) -> torch.Tensor:
    return (x.sin().expand(2, *x.shape) * x.cos()[None]).exp().clamp(max=3)


@pytest.mark.parametrize("function", [lower, pieces, attention, noisy, conjugate, spread])
def test_plan_when_it_recomputes_all_then_the_bits_are_the_same(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(function)))
    assert follow(course, repeat_all) > 0


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(WIDTH),
        nn.BatchNorm1d(WIDTH, momentum=None),
        Channels(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
        nn.GroupNorm(4, WIDTH),
        nn.RMSNorm(WIDTH),
    ],
)
def test_plan_when_it_recomputes_norms_then_their_statistics_are_the_same(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), norm, nn.GELU(), Twice())
    assert follow(Course(model), repeat_all, steps=3) > 0


def test_plan_when_forward_has_autocast_then_operators_run_again_as_they_were_cast() -> None:
    def cast_down(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.gelu(functional.linear(x, inner)).float()

    inner = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(cast_down), Twice()))
    assert follow(course, repeat_all) > 0


def test_plan_when_settings_held_in_a_part_of_forward_then_they_hold_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    again = ThreadSettings.again

    @contextlib.contextmanager
    def noted(self: ThreadSettings) -> Iterator[None]:
        with again(self):
            seen.append(torch._C._get_mkldnn_enabled())
            yield

    def without(x: torch.Tensor) -> torch.Tensor:
        torch._C._set_mkldnn_enabled(False)
        y = x.sin()
        torch._C._set_mkldnn_enabled(True)
        return y * x

    monkeypatch.setattr(ThreadSettings, "again", noted)
    course = Course(nn.Sequential(Apply(without), Twice()))

    def first(trace: Trace) -> tuple[Decision, ...]:
        return recompute(made_by(trace, "aten.sin")[0])

    assert follow(course, first) == 2
    assert seen == [False, False]


def test_plan_when_a_chain_is_long_then_no_stack_is_too_short() -> None:
    def floors(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            steps = x * 4
            for _ in range(5000):
                steps = torch.floor(steps)
        return steps * x

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(floors)), tokens=2)

    def last(trace: Trace) -> tuple[Decision, ...]:
        return recompute(made_by(trace, "aten.floor")[-1])

    assert follow(course, last, steps=1) > 5000


# ---- what changes in place -----------------------------------------------------------------------


def test_operand_when_changed_in_place_then_the_result_is_kept() -> None:
    """Plain autograd keeps the result, and does not mind."""

    def change(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            base = x * 2
        y = (base * x.detach()).exp() * x
        base.add_(1).mul_(3)
        return y + base

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(change)))
    follow(course, repeat_all)


def test_result_when_changed_in_place_then_it_raises_as_plain_autograd_does() -> None:
    is_late = False

    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.sin()
        if is_late:
            y.add_(1)
        return z

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(change)))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "aten.exp"))):
            is_late = True
            with pytest.raises(SavedTensorModified, match="modified by an inplace operation"):
                course.step()
            course.optimizer.zero_grad()
            is_late = False
            course.swapper.end_step()
    gc.collect()
    assert course.swapper.mover.indexed_count == 0


def test_operand_when_a_kernel_has_overwritten_it_then_backward_says_so() -> None:
    late: list[torch.Tensor] = []

    def overwrite(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            base = x * 2
        y = (base * x.detach()).exp() * x
        if late:
            base.numpy()[:] = 0  # which torch does not see
            with swapkit.op("kernel") as kernel:
                kernel.outputs(base)
        return y

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(overwrite)))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "aten.exp"))):
            late.append(torch.ones(1))
            with pytest.raises(SavedTensorModified, match="was overwritten by a kernel"):
                course.step()
            course.optimizer.zero_grad()
            course.swapper.end_step()


def test_result_when_its_data_changes_then_backward_uses_what_is_there_as_plain_autograd_does() -> (
    None
):
    late: list[bool] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x)
        z = y * x
        if late:
            y.data.clamp_(max=0.5)  # counted by another tensor
        return z

    def change_late(course: Course) -> None:
        late.append(True)
        course.step()

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(change)))
    expected = plain(course, Course.step, change_late)
    late.clear()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))):
            change_late(course)
    assert_same(course, expected)


# ---- lives ---------------------------------------------------------------------------------------


def test_step_when_a_captured_operator_raises_then_nothing_is_left() -> None:
    is_wrong = False

    def pick(x: torch.Tensor) -> torch.Tensor:
        where = torch.tensor([x.shape[0] + 5 if is_wrong else 0])
        return x.exp()[where].sin() * x

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(pick)))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *repeat_all(trace)) as following:
            is_wrong = True
            with pytest.raises(IndexError):
                course.step()
            is_wrong = False
            course.swapper.end_step()
            following.end_step()
            assert course.swapper.mover.indexed_count == 0
            course.step()
            assert following.end_step().deviation is None
    assert course.swapper.mover.indexed_count == 0


def test_graph_when_it_is_kept_then_each_pass_computes_again() -> None:
    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice()))

    def twice(course: Course) -> None:
        loss = course.forward()
        loss.backward(retain_graph=True)
        course.backward(loss)
        del loss
        course.end()

    course.step = twice.__get__(course)  # type: ignore[method-assign]
    expected = plain(course, twice, twice)
    with course.running():
        trace = course.record()
        first = [
            each
            for each, storage in enumerate(trace.storages)
            if storage.is_saved
            and storage.birth != BEFORE
            and storage.continues is None
            and trace.operators[storage.birth].name == "aten.sin.default"
        ]
        with course.following_plan(trace, *recompute(*first)) as following:
            before = course.swapper.counters().recomputed
            twice(course)
            assert following.end_step().deviation is None
    assert course.swapper.counters().recomputed - before == 2 * len(first)
    assert_same(course, expected)


def test_graph_when_it_outlives_the_session_then_it_is_used_all_the_same() -> None:
    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice()))
    expected = plain(course, Course.step, lambda other: other.backward(other.forward()))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "aten.sin"))):
            loss = course.forward()
    before = course.swapper.counters().recomputed
    course.backward(loss)
    assert course.swapper.counters().recomputed > before
    assert_same(course, expected)


# ---- names ---------------------------------------------------------------------------------------


def test_operator_when_torch_has_none_of_the_name_then_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"the plan recomputes with aten\.not_there\.default"):
        find_operator("aten.not_there.default")


def test_operator_when_seen_twice_then_it_is_one() -> None:
    assert see("aten.mul.Tensor") == see("aten.mul.Tensor")
    assert cast("Any", find_operator("aten.mul.Tensor")) is torch.ops.aten.mul.Tensor
