"""Whose operators a plan may repeat, for how long, and what watching them leaves behind."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import swapkit
from swapkit._runtime.torch_compat.dispatch_modes import OwnMode
from swapkit._runtime.user_choices.wrapping import make_part, part_of
from swapkit.registry import Choice, Exclude, Source, Swap
from tests.unit._runtime.plan_rig import (
    TOKENS,
    WIDTH,
    Course,
    Twice,
    assert_same,
    block,
    follow,
    made_by,
    plain,
    recompute,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.plans import Decision
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


# ---- a user's choices ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        Choice(source=Source.DECORATOR, what=Exclude()),
        Choice(source=Source.DECORATOR, what=Exclude(), operator="gelu"),
    ],
)
def test_choices_when_a_user_excludes_it_then_it_is_not_recomputed(what: Choice) -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 2)
    with course.running():
        make_part(block(course, 0).act).add(what)
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))) as following:
            shown = {row.where: row.holds for row in swapkit.choices(course.model)}
            course.step()
            assert "to save storage" in (following.end_step().deviation or "")
    assert shown["blocks.1.act.aten.gelu.default"]
    assert_same(course, expected)


def test_choices_when_a_user_swaps_an_operator_then_the_plan_leaves_it() -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 2)
    row = Choice(source=Source.DECORATOR, what=Swap(min_bytes=1), operator="gelu")
    with course.running():
        for number in range(3):
            make_part(block(course, number).act).add(row)
        make_part(course.model).is_carrier = True
        trace = course.record()
        course.swapper.scheduler.drain()
        before = course.moved()[0]
        # What is chosen for the linear layers holds; what is chosen for the activations does not.
        assert not made_by(trace, "gelu")
        with course.following_plan(trace, *recompute(*made_by(trace, "addmm"))) as following:
            loss = course.forward()
            course.swapper.scheduler.drain()
            assert course.moved()[0] - before == 3 * TOKENS * 2 * WIDTH * 4
            course.backward(loss)
            del loss
            course.end()
            assert following.end_step().deviation is None
    assert course.swapper.counters().recomputed == 3
    assert_same(course, expected)


@pytest.mark.parametrize("scope", [swapkit.keep, swapkit.offload])
def test_choices_when_a_scope_of_the_users_is_open_then_nothing_there_is_recomputed(
    scope: Callable[[], object],
) -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 2)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))) as following:
            with scope():  # type: ignore[attr-defined]
                loss = course.forward()
            course.backward(loss)
            del loss
            course.end()
            assert following.end_step().deviation is not None
    assert course.swapper.counters().recomputed == 0
    assert_same(course, expected)


def test_choices_when_a_scope_is_open_in_the_module_then_nothing_there_is_recomputed() -> None:
    class Scoped(Twice):
        is_scoped = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with swapkit.keep() if self.is_scoped else contextlib.nullcontext():
                return super().forward(x)

    course = Course(Scoped())
    expected = plain(course, *[Course.step] * 2)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "aten.sin"))) as following:
            cast("Any", course.model).is_scoped = True
            course.step()
            assert following.end_step().deviation is not None
    assert course.swapper.counters().recomputed == 0
    assert_same(course, expected)


def test_choices_when_a_part_is_checkpointed_then_the_plan_goes_around_it() -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 3)
    with course.running():
        swapkit.checkpoint(block(course, 1))
        trace = course.record()
        again = made_by(trace, "gelu")
        assert len(again) == 2
        with course.following_plan(trace, *recompute(*again)) as following:
            before = course.swapper.counters().recomputed
            for _ in range(2):
                course.step()
                assert following.end_step().deviation is None
        assert course.swapper.counters().recomputed - before == 2 * (2 + 1)
    assert_same(course, expected)


# ---- life ----------------------------------------------------------------------------------------


def test_rows_when_the_plan_ends_then_they_are_gone_and_the_users_are_there() -> None:
    course = Course()
    swapkit.keep(block(course, 2))
    before = str(swapkit.choices(course.model))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))):
            course.step()
            shown = {row.where: row for row in swapkit.choices(course.model)}
            row = shown["blocks.0.act.aten.gelu.default"]
            assert (row.by, row.what, row.holds, row.operators) == ("planner", "recompute", True, 1)
        assert str(swapkit.choices(course.model)) == before
        assert part_of(block(course, 0).act) is None
        assert "forward" not in block(course, 0).act.__dict__


@pytest.mark.parametrize("is_over", [False, True])
def test_copies_when_a_model_is_copied_or_pickled_then_they_follow_no_plan(is_over: bool) -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))) as following:
            course.step()
            if is_over:
                following.stop()
            for other in (
                copy.deepcopy(course.model),
                pickle.loads(pickle.dumps(course.model)),
            ):
                assert len(swapkit.choices(other)) == 0
                assert torch.equal(other(torch.ones(2, WIDTH)), course.model(torch.ones(2, WIDTH)))


def test_operands_when_the_optimizer_changes_them_before_backward_then_results_are_kept() -> None:
    """`embedding` does not save its weight, so plain autograd does not mind."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            words = (x[:, 0].abs() * 4).long().clamp(max=15)
            return functional.embedding(words, self.table).sin()

    def late(course: Course) -> None:
        loss = course.forward()
        for parameter in course.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        course.optimizer.step()
        course.backward(loss)
        course.optimizer.zero_grad()
        del loss
        course.swapper.end_step()

    course = Course(Words())
    expected = plain(course, Course.step, late)
    with course.running():
        trace = course.record()
        (chosen,) = made_by(trace, "embedding")
        with course.following_plan(trace, *recompute(chosen)):
            late(course)
    assert_same(course, expected)


def test_step_when_a_module_raises_then_the_next_one_follows_the_plan() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise ZeroDivisionError
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x * self.scale)
            try:
                self.inner(x[:1])
            except ZeroDivisionError:
                y = y * 2
            return torch.exp(self.inner(y).clamp(max=2))

    def interrupt(_: torch.Tensor) -> None:
        raise KeyboardInterrupt  # after which torch calls no hooks

    course = Course(Outer())
    follow(course, lambda trace: recompute(*made_by(trace, "aten.exp")))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "aten.exp"))):
            cast("Any", course.model).inner.forward = lambda _: 1 / 0
            with pytest.raises(ZeroDivisionError):
                course.step()
            cast("Any", course.model).inner.forward = interrupt
            with pytest.raises(KeyboardInterrupt):
                course.step()
    assert course.swapper.mover.indexed_count == 0


def test_plan_when_it_recomputes_then_no_mode_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(trace: Trace) -> tuple[Decision, ...]:
        monkeypatch.setattr(OwnMode, "__enter__", lambda _self: 1 / 0)
        return recompute(*made_by(trace, "gelu"))

    assert follow(Course(), choose) == 2 * 3


def test_rows_when_a_user_takes_a_plans_back_then_nothing_is_computed_again() -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 3)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))):
            course.step()
            before = course.swapper.counters().recomputed
            assert before > 0
            assert swapkit.choices(course.model).remove(by="planner") == 3
            assert len(swapkit.choices(course.model)) == 0
            course.step()
        assert course.swapper.counters().recomputed == before
    assert_same(course, expected)
