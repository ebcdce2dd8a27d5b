"""A plan's recomputations: of single operators, in the call and at the place that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from swapkit.ir.plans import Action, Decision
from tests.unit._runtime.plan_rig import (
    WIDTH,
    Course,
    Twice,
    follow,
    forward_end,
    made_by,
    maker,
    recompute,
    swap_all,
)

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


def test_plan_when_it_recomputes_single_operators_then_each_runs_once_more() -> None:
    assert follow(Course(), lambda trace: recompute(*made_by(trace, "gelu"))) == 2 * 3


def test_plan_when_it_recomputes_chains_then_each_operator_runs_once_more() -> None:
    def choose(trace: Trace) -> tuple[Decision, ...]:
        chain = (*made_by(trace, "gelu"), *made_by(trace, "addmm"))
        return recompute(*chain, *made_by(trace, "native_layer_norm"))

    assert follow(Course(), choose) == 2 * 9


def test_plan_when_it_mixes_then_operands_come_back_for_what_is_recomputed() -> None:
    course = Course()

    def choose(trace: Trace) -> tuple[Decision, ...]:
        again = made_by(trace, "gelu")
        end = forward_end(trace)
        return recompute(*again) + tuple(
            Decision(storage=each.storage, action=Action.SWAP, release=end)
            for each in swap_all(trace, *again)
        )

    assert follow(course, choose) == 2 * 3
    assert course.moved()[0] == course.moved()[1] > 0


def test_plan_when_an_operand_is_gone_already_then_the_recipe_does_not_keep_it() -> None:
    course = Course()

    class Eager:
        """Lets everything that leaves be gone when its event ends."""

        def saved(self, _tensor: torch.Tensor, _packed: object) -> None:
            course.swapper.scheduler.drain()
            while course.swapper.mover.release_next():
                pass

        def used(self, _packed: object, _tensor: torch.Tensor) -> None:
            pass

    with course.running():
        trace = course.record()
        again = made_by(trace, "gelu")
        with course.following_plan(trace, *recompute(*again), *swap_all(trace, *again)):
            course.hooks.packer.observer = Eager()
            loss = course.forward()
            course.hooks.packer.observer = None
            assert [
                group.nbytes for group in course.swapper.mover.resident if group.is_exclusive
            ] == []
            del loss


def test_plan_when_it_recomputes_one_of_several_results_then_the_others_stay() -> None:
    course = Course()
    kept: list[bool] = []

    def choose(trace: Trace) -> tuple[Decision, ...]:
        large = [each for each in made_by(trace, "native_layer_norm") if is_large(trace, each)]
        kept.append(len(large) == 3)
        return recompute(*large)

    def is_large(trace: Trace, storage: int) -> bool:
        return trace.storages[storage].nbytes > 4096

    assert follow(course, choose) == 2 * 3
    assert kept == [True]


@pytest.mark.parametrize("which", [0, 2, 5])
def test_plan_when_it_names_one_run_of_an_operator_then_only_that_runs_again(which: int) -> None:
    course = Course(nn.Sequential(Twice(), Twice()))
    seen: list[str] = []

    def choose(trace: Trace) -> tuple[Decision, ...]:
        chosen = made_by(trace, "aten.sin")[which]
        seen.append(trace.operators[maker(trace, chosen)].module)
        return recompute(chosen)

    assert follow(course, choose) == 2
    assert seen == [str(which // 6)] or len(seen) == 1


def test_plan_when_a_module_is_called_twice_then_only_the_call_that_it_names() -> None:
    for which in (0, -1):
        shared = Twice()
        course = Course(nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared))
        chosen = which
        assert follow(course, lambda trace: recompute(made_by(trace, "sin")[chosen])) == 2  # noqa: B023


class Unsaved(nn.Module):
    """`floor` and what follows save nothing; `mul` saves what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            steps = torch.floor(x * 4)
        return (steps / 3) * self.weight


def test_plan_when_a_chain_goes_through_what_nobody_saved_then_its_operators_run_too() -> None:
    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Unsaved()))

    def choose(trace: Trace) -> tuple[Decision, ...]:
        (chosen,) = made_by(trace, "aten.div")
        return recompute(chosen)

    # `div` from what `floor` made, that from what `mul` made, that from what `addmm` made.
    assert follow(course, choose) == 2 * 4


def test_plan_when_it_recomputes_random_operators_then_the_same_numbers_come() -> None:
    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Twice()))
    names = ("bernoulli", "native_dropout", "div", "mul")

    def choose(trace: Trace) -> tuple[Decision, ...]:
        return recompute(*dict.fromkeys(each for name in names for each in made_by(trace, name)))

    assert follow(course, choose) > 0


def test_plan_when_it_recomputes_what_no_module_makes_then_that_is_swapped() -> None:
    course = Course()
    course.loss = lambda y: y.sigmoid().tanh().sum()
    assert follow(course, lambda trace: recompute(*made_by(trace, "sigmoid"))) == 0
    assert course.moved()[0] > 0
