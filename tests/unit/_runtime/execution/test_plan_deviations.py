"""Steps that go another way than the plan's: they are noticed, and the numbers stay the same."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from swapkit._native.sched import State
from swapkit._runtime.execution.plan_compiler import compile_plan
from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.saved.device import Curve
from swapkit._runtime.shim.types import NO_LIMIT
from swapkit.ir.plans import Action, Decision, Plan
from tests.support import MIB
from tests.support.threads import on_thread, on_threads
from tests.unit._runtime.plan_rig import (
    TOKENS,
    WIDTH,
    Course,
    assert_same,
    forward_end,
    items,
    made_by,
    plain,
    recompute,
    swap_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


# ---- steps ---------------------------------------------------------------------------------------


def skip(course: Course) -> None:
    """Leave a block out."""
    course.model.skipped = {1}  # type: ignore[assignment]
    course.step()
    course.model.skipped = set()  # type: ignore[assignment]


def shorten(course: Course) -> None:
    """Use another shape."""
    course.tokens = TOKENS // 2
    course.step()
    course.tokens = TOKENS


def add_forward(course: Course) -> None:
    """Run one more forward pass, of which there is no backward."""
    course.forward()
    course.step()


def evaluate(course: Course) -> None:
    """Evaluate in the middle of a step."""
    loss = course.forward()
    with torch.no_grad():
        course.model(course.batch())
    course.backward(loss)
    del loss
    with torch.no_grad():
        course.model(course.batch())
    course.end()


def fail(course: Course) -> None:
    """Raise in the middle of a forward pass, and try again."""
    broken = course.model.blocks[1].down  # type: ignore[index, union-attr]
    handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        course.forward()
    handle.remove()
    course.step()


def end_early(course: Course) -> None:
    """End the step without a backward pass."""
    course.forward()
    course.end()


def add_backward(course: Course) -> None:
    """Keep the graph, and run its backward pass twice."""
    loss = course.forward()
    loss.backward(retain_graph=True)
    course.backward(loss)
    del loss
    course.end()


def differentiate_twice(course: Course) -> None:
    """Differentiate the gradients, too."""
    loss = course.forward()
    parameters = list(course.model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    penalty = sum(each.pow(2).sum() for each in gradients)
    course.backward(loss + penalty)
    del loss, gradients, penalty
    course.end()


def fly_two(course: Course) -> None:
    """Have two graphs in flight, the older one first."""
    first = course.forward()
    second = course.forward()
    course.backward(first)
    course.backward(second)
    del first, second
    course.end()


def accumulate(course: Course) -> None:
    """Accumulate the gradients of two batches."""
    course.backward(course.forward())
    course.backward(course.forward())
    course.end()


def keep_graph(course: Course) -> None:
    """Let a graph live beyond the step, and use it in the next one."""
    first = course.forward()
    course.end()
    course.backward(first)
    del first
    course.step()


def use_threads(course: Course) -> None:
    """Run two passes on two threads, one after the other."""
    for _ in range(2):
        on_thread(lambda: course.backward(course.forward()))
    course.end()


def look_into(course: Course) -> None:
    """Look at what a node has saved."""
    loss = course.forward()
    node: Any = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node._saved_self.isfinite().all()
    course.backward(loss)
    del loss, node
    course.end()


STEPS = [
    skip,
    shorten,
    add_forward,
    evaluate,
    fail,
    end_early,
    add_backward,
    differentiate_twice,
    fly_two,
    accumulate,
    keep_graph,
    use_threads,
    look_into,
]
AS_RECORDED = {evaluate}


def mixed(trace: Trace) -> tuple[Decision, ...]:
    """Return a plan with all that there is: what leaves, comes early, is made again, and stays."""
    again, linear = made_by(trace, "gelu"), made_by(trace, "addmm")
    moved = swap_all(trace, *again, linear[0])
    end = forward_end(trace)
    early = end + 8
    return recompute(*again) + tuple(
        replace(each, release=end, prefetch=early) if number % 2 else each
        for number, each in enumerate(moved)
    )


def everything(trace: Trace) -> tuple[Decision, ...]:
    """Return a plan in which everything leaves."""
    return tuple(replace(each, release=forward_end(trace)) for each in swap_all(trace))


def made_again(trace: Trace) -> tuple[Decision, ...]:
    """Return a plan in which chains are recomputed."""
    names = ("gelu", "addmm", "native_layer_norm")
    return recompute(*(each for name in names for each in made_by(trace, name)))


@pytest.mark.promise("A1")
@pytest.mark.parametrize("choose", [mixed, everything, made_again])
@pytest.mark.parametrize("step", STEPS)
def test_step_when_it_goes_another_way_then_it_is_said_and_the_numbers_are_the_same(
    step: Callable[[Course], None], choose: Callable[[Trace], tuple[Decision, ...]]
) -> None:
    course = Course()
    expected = plain(course, Course.step, step, Course.step, step)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *choose(trace)) as following:
            step(course)
            deviation = following.end_step().deviation
            assert (deviation is None) == (step in AS_RECORDED), deviation
            course.step()
            assert following.end_step().deviation is None
            step(course)
        assert course.swapper.mover.out == []
    assert_same(course, expected)


def test_deviation_when_sizes_or_modules_differ_then_it_says_where_and_what() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *swap_all(trace)) as following:
            shorten(course)
            text = following.end_step().deviation or ""
            assert "expected autograd to save storage" in text
            assert (
                "autograd saves a storage unknown to the plan, 32.00 KiB of blocks.0.norm" in text
            )
            skip(course)
            assert "blocks.1.norm; instead" in (following.end_step().deviation or "")
            end_early(course)
            text = following.end_step().deviation or ""
            assert f"the step ended after 31 of {len(trace.events)} events" in text
            add_forward(course)
            text = following.end_step().deviation or ""
            assert "event 31: expected autograd to use storage" in text
            accumulate(course)
            text = following.end_step().deviation or ""
            assert f"expected the step to end after {len(trace.events)} events" in text


def test_deviation_when_other_threads_events_were_counted_since_then_its_own_place_is_said() -> (
    None
):
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *swap_all(trace)) as following:
            following.deviated((2, True, -1, -1, -1, True))  # nothing has been counted so far
            text = following._deviation or ""
    assert text.startswith("event 2: expected autograd to ")
    assert text.endswith("instead, autograd saves a recomputed tensor")


def test_deviation_when_something_is_out_then_it_comes_back_ahead_of_its_use() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *everything(trace)) as following:
            loss = course.forward()
            course.swapper.scheduler.drain()
            course.model(course.batch())
            out = list(course.swapper.mover.out)
            assert following.end_step().deviation is not None
        assert sum(group.nbytes for group in out) > MIB
        (gradient,) = torch.autograd.grad(loss, course.model.blocks[2].down.bias)  # type: ignore[index, union-attr]
        assert gradient is not None
        # Of what was not used at all, the newest.
        assert {State(group.state) for group in out[-3:]} <= {State.CLEAN, State.COPYING_IN}


# ---- by curve ------------------------------------------------------------------------------------


def bytes_out_of(course: Course, *decisions: Decision, trace: Trace) -> int:
    """Return what a step of half the length sends out under a plan."""
    with course.following_plan(trace, *decisions) as following:
        course.swapper.scheduler.drain()
        before = course.moved()[0]
        course.tokens = TOKENS // 2
        loss = course.forward()
        course.swapper.scheduler.drain()
        out = course.moved()[0] - before
        course.tokens = TOKENS
        course.backward(loss)
        del loss
        course.end()
        assert following.end_step().deviation is not None
    return out


def test_curve_when_a_step_has_another_shape_then_as_many_bytes_leave_by_then() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        large = [each for each in items(trace) if trace.storages[each].nbytes > 4096]
        whole = sum(trace.storages[each].nbytes for each in items(trace)) // 2
        first = large[: len(large) // 3]
        some = sum(trace.storages[each].nbytes for each in first)
        assert bytes_out_of(course, trace=trace) == 0
        swaps = [Decision(storage=each, action=Action.SWAP) for each in first]
        moved = bytes_out_of(course, *swaps, trace=trace)
        assert 0.7 * some < moved <= some
        moved = bytes_out_of(course, *everything(trace), trace=trace)
        batch = 4 * WIDTH * TOKENS // 2
        held = 2 * batch  # the batch itself, and what backward begins with
        assert moved == whole - held


def test_curve_when_a_module_is_reached_then_its_bytes_are_the_goal() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        plan = Plan(decisions=everything(trace), budget_bytes=1)
        table = compile_plan(trace, plan, course.installation.tracker)
        curve = Curve(course.swapper.mover, table.curve, 0)
        goals = [curve._goal()]
        for name in ("blocks.1.norm", "blocks.0.norm", "blocks.2.act"):
            tag = course.installation.tracker.tag_named(name)
            curve.saved(cast("Any", SimpleNamespace(tag=tag, nbytes=1 << 40)))
            goals.append(curve._goal())
    assert goals == sorted(goals)
    assert goals[0] < goals[1] == goals[2] < goals[3]
    assert goals[3] <= sum(trace.storages[each].nbytes for each in items(trace))


def test_mode_of_write_behind_when_a_step_deviates_then_it_works_again() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace) as following:
            mover = course.swapper.mover
            mover.watermark_bytes, mover.ahead_bytes = 0, NO_LIMIT
            before = course.moved()[0]
            course.step()
            assert following.end_step().deviation is None
            assert course.moved()[0] == before
            mover.ahead_bytes = NO_LIMIT
            shorten(course)
            assert following.end_step().deviation is not None
            assert course.moved()[0] > before


def test_plan_when_two_models_train_on_two_threads_then_each_follows_its_own() -> None:
    courses = [Course(), Course(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))]
    expected = [plain(course, *[Course.step] * 4) for course in courses]
    ready = threading.Barrier(2)
    deviations: list[str | None] = []

    def train(course: Course) -> None:
        with course.running():
            trace = course.record()
            ready.wait()
            with course.following_plan(trace, *swap_all(trace)) as following:
                for _ in range(3):
                    course.step()
                    deviations.append(following.end_step().deviation)
            ready.wait()

    on_threads(*[partial(train, course) for course in courses])
    assert deviations == [None] * 6
    for course, each in zip(courses, expected, strict=True):
        assert_same(course, each)


def test_following_when_it_is_started_twice_then_the_later_plan_holds() -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 3)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *recompute(*made_by(trace, "gelu"))) as following:
            course.step()
            assert following.end_step().deviation is None
            following.stop()
            plan = Plan(decisions=swap_all(trace), budget_bytes=1)
            later = PlanExecutor(course.swapper, course.model, trace, plan)
            later.start()
            course.step()
            assert later.end_step().deviation is None
            later.stop()
        assert course.moved()[0] > 0
        assert course.swapper.counters().recomputed == 3
    assert_same(course, expected)
