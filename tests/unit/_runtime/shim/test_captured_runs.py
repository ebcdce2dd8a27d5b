"""Which run of an operator is captured, and users' operators that are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.unit._runtime.plan_rig import (
    WIDTH,
    Apply,
    Course,
    assert_same,
    defined,
    follow,
    made_by,
    plain,
    recompute,
    repeat_all,
)

if TYPE_CHECKING:
    from swapkit.ir.plans import Decision
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


# ---- which run -----------------------------------------------------------------------------------


def test_run_when_the_kernel_of_another_operator_runs_the_same_then_that_is_not_counted() -> None:
    """`rsub` runs `sub`."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        first = 1 - x
        second = x - x.cos()
        return first.sin() + (second + 1.0).sin()

    def choose(trace: Trace) -> tuple[Decision, ...]:
        (late,) = made_by(trace, "aten.add.Tensor")[:1] or made_by(trace, "aten.add.Scalar")[:1]
        return recompute(late)

    assert follow(Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(gate))), choose) > 0


def test_plan_when_an_operator_has_many_results_then_all_are_computed_again() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        made = torch._foreach_mul([x] * 40, 2.0)
        return torch.stack([each.sin() for each in made]).sum(0)

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(scale)))
    follow(course, repeat_all, steps=1)


# ---- users' operators ----------------------------------------------------------------------------


class Stopped(Exception):
    """What an operator raises."""


@pytest.mark.parametrize("error", [Stopped, torch.OutOfMemoryError, KeyboardInterrupt])
def test_operator_when_it_raises_the_second_time_then_that_is_raised(
    error: type[BaseException],
) -> None:
    fails: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise error("again")
        return x * 2

    with defined("raising", double, "(Tensor x) -> Tensor") as operator:
        course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(operator)))
        with course.running():
            trace = course.record()
            with course.following_plan(trace, *recompute(*made_by(trace, "raising"))):
                loss = course.forward()
                fails.append(True)
                with pytest.raises(error, match="again"):
                    loss.backward()
                del loss
                course.optimizer.zero_grad()
                course.swapper.end_step()


def test_operands_when_a_rescue_comes_while_the_operator_runs_then_they_stay() -> None:
    again: list[int] = []

    def hungry(x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1 and again:
            # As the pool does where the operator's own memory does not fit.
            again.append(course.swapper.rescue_bytes(1 << 30))
        return x * 2

    with defined("hungry", hungry, "(Tensor x) -> Tensor") as operator:
        course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(operator)))
        expected = plain(course, Course.step, Course.step)
        with course.running():
            trace = course.record()
            with course.following_plan(trace, *recompute(*made_by(trace, "hungry"))):
                again.append(0)
                course.step()
    assert len(again) == 2
    assert_same(course, expected)


def test_operator_when_defined_anew_with_fewer_arguments_then_it_runs_as_it_is() -> None:
    for schema, extra in (
        ("(Tensor x, int a=1, int b=2) -> Tensor", 2),
        ("(Tensor x) -> Tensor", 0),
    ):

        def double(x: torch.Tensor, *_rest: int) -> torch.Tensor:
            return x * 2

        with defined("anew", double, schema) as operator:
            assert len(operator.default._schema.arguments) == 1 + extra
            course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(operator)))
            follow(course, lambda trace: recompute(*made_by(trace, "anew")), steps=1)
