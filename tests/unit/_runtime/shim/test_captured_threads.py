"""Captured operators, and what other threads do meanwhile."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.support.threads import Worker, on_thread
from tests.unit._runtime.plan_rig import (
    TOKENS,
    WIDTH,
    Apply,
    Course,
    assert_same,
    defined,
    made_by,
    plain,
    recompute,
    repeat_all,
)

if TYPE_CHECKING:
    from swapkit._runtime.execution.plan_executor import PlanExecutor

pytestmark = pytest.mark.usefixtures("installation")

WINDOW_SECONDS = 0.5  # in which a thread that does not wait for another one has long gone on


def test_operand_when_changed_on_a_thread_while_autograd_repeats_then_the_change_waits() -> None:
    base = torch.randn(TOKENS, WIDTH)
    writers: list[Worker[torch.Tensor]] = []
    runs: list[int] = []  # by thread
    has_waited: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        runs.append(threading.get_ident())
        if is_armed and torch._C._current_graph_task_id() != -1 and not writers:
            writers.append(Worker(lambda: base.add_(1)))
            writers[0].thread.join(WINDOW_SECONDS)
            has_waited.append(writers[0].thread.is_alive())
        return x * 2

    is_armed = False
    with defined("doubling", double, "(Tensor x) -> Tensor") as operator:
        course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(lambda x: operator(base) * x)))
        expected = plain(course, Course.step, Course.step)
        with course.running():
            trace = course.record()
            with course.following_plan(trace, *recompute(*made_by(trace, "doubling"))):
                is_armed = True
                runs.clear()
                course.step()
                writers[0].finish()
    assert has_waited == [True]
    # In forward, and once more: there was nothing left to compute before the change.
    assert runs == [threading.get_ident()] * 2
    assert_same(course, expected)


def test_operator_when_another_plan_begins_while_it_runs_then_that_one_has_captured_nothing() -> (
    None
):
    others: list[PlanExecutor] = []

    def begin_other() -> None:
        plans.close()
        others.append(plans.enter_context(course.following_plan(trace, *repeat_all(trace))))

    is_armed = False

    def double(x: torch.Tensor) -> torch.Tensor:
        if is_armed and not others:
            on_thread(begin_other)
        return x * 2

    with defined("replacing", double, "(Tensor x) -> Tensor") as operator, ExitStack() as plans:
        course = Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(lambda x: operator(x).sin())))
        expected = plain(course, Course.step, Course.step)
        with course.running():
            trace = course.record()
            plans.enter_context(course.following_plan(trace, *recompute(*made_by(trace, "repl"))))
            is_armed = True
            course.step()
            (other,) = others
            assert other._follower is not None
            captured = other._follower.captured()
            plans.close()
    assert len(captured) > 1
    assert set(captured) == {0}
    assert course.swapper.counters().recomputed == 0
    assert course.swapper.mover.indexed_count == 0
    assert_same(course, expected)
