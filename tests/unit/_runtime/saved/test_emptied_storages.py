"""Storages whose memory is gone between forward and backward, as that of FSDP's weights is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from swapkit.errors import SavedTensorModified
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Phase
from swapkit.simulation.validator import find_violations
from tests.unit._runtime.plan_rig import (
    TOKENS,
    WIDTH,
    Apply,
    Course,
    Twice,
    made_by,
    recompute,
)

if TYPE_CHECKING:
    from swapkit.ir.plans import Decision
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


class Sharded(nn.Module):
    """A product with a weight that has no memory between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.empties = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        kept, storage = weight.detach().clone(), weight.untyped_storage()
        nbytes = storage.nbytes()

        def fill(gradient: torch.Tensor) -> torch.Tensor:
            storage.resize_(nbytes)
            weight.data.copy_(kept)
            return gradient

        y = functional.linear(x, weight)
        if self.empties:
            y.register_hook(fill)
            storage.resize_(0)
        return y


def sharded_course() -> tuple[Course, Sharded]:
    sharded = Sharded()
    return Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), sharded, Twice())), sharded


def from_weight(trace: Trace) -> tuple[Decision, ...]:
    return recompute(*made_by(trace, "aten.mm"))


def test_plan_when_a_weight_has_no_memory_in_between_then_nothing_is_computed_from_it() -> None:
    course, sharded = sharded_course()
    machine = Machine(budget_bytes=1 << 40, out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    found = {}
    with course.running():
        for sharded.empties in (False, True):
            trace = course.record()
            plan = Plan(decisions=from_weight(trace), budget_bytes=1 << 40)
            found[sharded.empties] = find_violations(trace, plan, machine)
            (weight,) = {
                storage
                for operator in trace.operators
                if operator.name == "aten.mm.default" and operator.phase is Phase.FORWARD
                for storage in operator.reads
                if trace.storages[storage].nbytes == 4 * WIDTH * WIDTH
            }
            backward = next(
                number
                for number, each in enumerate(trace.operators)
                if each.phase is Phase.BACKWARD
            )
            assert (trace.storages[weight].death <= backward) == sharded.empties
    assert found[False] == []
    assert any("is gone by then" in each for each in found[True]), found


def test_weight_when_it_has_no_memory_where_a_result_is_computed_again_then_refused() -> None:
    course, sharded = sharded_course()
    sharded.empties = False
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *from_weight(trace)):
            sharded.empties = True
            with pytest.raises(SavedTensorModified, match=r"operand of aten\.mm.*has no memory"):
                course.step()
            course.optimizer.zero_grad()
            course.swapper.end_step()


def test_activation_when_it_has_no_memory_where_a_result_is_computed_again_then_refused() -> None:
    late: list[bool] = []
    base = torch.randn(TOKENS, WIDTH)

    def empty(x: torch.Tensor) -> torch.Tensor:
        y = base.exp() * x
        if late:
            base.untyped_storage().resize_(0)
        return y

    course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(empty)))
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "aten.exp"))):
            late.append(True)
            with pytest.raises(SavedTensorModified, match=r"operand of aten\.exp.*has no memory"):
                course.step()
            course.optimizer.zero_grad()
            course.swapper.end_step()
