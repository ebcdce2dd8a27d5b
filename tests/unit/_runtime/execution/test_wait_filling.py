"""A plan's recomputations in waits for other ranks: in the wait that the plan names, or not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed

from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.execution.planned_recomputation import WaitFiller
from swapkit.ir.plans import Plan
from swapkit.ir.traces import WAIT
from tests.support import MIB
from tests.support.threads import on_thread
from tests.unit._runtime.plan_rig import (
    Apply,
    Course,
    assert_same,
    items,
    made_by,
    maker,
    plain,
    recompute,
)
from tests.unit._runtime.rig import in_use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit.ir.plans import Decision
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation", "group")
distributed: Any = torch.distributed


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wait() -> None:
    distributed.all_reduce(torch.zeros(1), async_op=True).wait()


class WaitingCourse(Course):
    """Waits twice between forward and backward; notes the recomputations by then."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__(model)
        self.counts: list[int] = []
        self.loss = self._wait_twice

    def _wait_twice(self, y: torch.Tensor) -> torch.Tensor:
        loss = y.pow(2).mean()
        self.counts.append(self.count())
        for _ in range(2):
            self.wait()
            self.counts.append(self.count())
        return loss

    def wait(self) -> None:
        wait()

    def count(self) -> int:
        """Return the recomputations so far."""
        return self.swapper.counters().recomputed


def in_wait(trace: Trace, number: int) -> tuple[Decision, ...]:
    """Return decisions to recompute what one kind of operator makes, in a wait."""
    decisions = recompute(*made_by(trace, "gelu"))
    assert len(decisions) == 3
    return tuple(replace(each, prefetch=waits_of(trace)[number]) for each in decisions)


def waits_of(trace: Trace) -> list[int]:
    return [at for at, each in enumerate(trace.operators) if each.name == WAIT]


def gelus_in_first_wait(trace: Trace) -> tuple[Decision, ...]:
    """Return decisions to recompute what GELU makes in the first wait, and in later passes."""
    firsts = [each for each in items(trace) if trace.storages[each].continues is None]
    made = [each for each in firsts if "gelu" in trace.operators[maker(trace, each)].name]
    again = [at for at, each in enumerate(trace.storages) if each.continues in made]
    assert (len(made), len(again)) == (3, 3)
    early = (replace(each, prefetch=waits_of(trace)[0]) for each in recompute(*made))
    return (*early, *recompute(*again))


@pytest.mark.parametrize(("number", "counts"), [(0, [0, 3, 3]), (1, [0, 0, 3])])
def test_wait_when_the_plan_recomputes_in_it_then_once_and_there(
    number: int, counts: list[int]
) -> None:
    course = WaitingCourse()
    expected = plain(course, *[Course.step] * 3)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *in_wait(trace, number)) as following:
            for step in range(2):
                course.counts.clear()
                course.step()
                assert course.counts == [each + 3 * step for each in counts]
                assert course.count() == 3 * (step + 1), "backward recomputes nothing again"
                report = following.end_step()
                assert (report.deviation, report.refused_prefetches) == (None, 0)
        wait()  # nobody listens any more
    assert_same(course, expected)


def test_wait_when_another_thread_waits_then_the_step_is_not_concerned() -> None:
    course = WaitingCourse()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *in_wait(trace, 0)):
            course.wait = lambda: on_thread(wait)  # type: ignore[method-assign]
            course.counts.clear()
            course.step()
            assert course.counts == [0, 0, 0]
            assert course.count() == 3, "in backward, as without the wait"


def test_wait_when_recomputing_fails_in_it_then_it_waits_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = WaitingCourse()
    expected = plain(course, *[Course.step] * 2)

    def fail(_self: WaitFiller) -> None:
        raise torch.OutOfMemoryError("out of memory.")

    with course.running():
        trace = course.record()
        with course.following_plan(trace, *in_wait(trace, 0)) as following:
            monkeypatch.setattr(WaitFiller, "_recompute", fail)
            course.step()
            assert course.count() == 3
            assert following.end_step().deviation is None
    assert_same(course, expected)


def test_wait_when_another_backward_waits_then_the_step_does_not_count_it() -> None:
    course = WaitingCourse()

    def wait_in_backward() -> None:
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: wait())
        on_thread(y.backward)
        wait()

    with course.running():
        trace = course.record()
        with course.following_plan(trace, *in_wait(trace, 0)):
            course.wait = wait_in_backward  # type: ignore[method-assign]
            course.counts.clear()
            course.step()
            assert course.counts == [0, 3, 3]
        with course.following_plan(trace, *in_wait(trace, 1)):
            course.counts.clear()
            course.step()
            assert course.counts == [3, 3, 6]


class TwoPasses(WaitingCourse):
    """A second backward pass, of the same graph or of the first one's."""

    def __init__(self, *, is_double: bool) -> None:
        super().__init__()
        self.is_double = is_double
        self.between: list[int] = []  # bytes in use between the passes

    def backward(self, loss: torch.Tensor) -> None:
        if self.is_double:
            weights = list(self.model.parameters())
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            loss = torch.stack([each.pow(2).sum() for each in gradients]).sum() + loss
        else:
            loss.backward(retain_graph=True)
        self.between.append(in_use(self.installation))
        super().backward(loss)


@pytest.mark.parametrize("is_double", [False, True])
def test_passes_when_the_first_ones_bytes_came_in_a_wait_then_the_second_has_its_own(
    *, is_double: bool
) -> None:
    course = TwoPasses(is_double=is_double)
    expected = plain(course, *[Course.step] * 3)
    with course.running():
        trace = course.record()
        early = gelus_in_first_wait(trace)
        late = tuple(replace(each, prefetch=None) for each in early)
        course.between.clear()
        for decisions in late, early:
            with course.following_plan(trace, *decisions) as following:
                before = course.count()
                course.step()
                assert following.end_step().deviation is None
                assert course.count() == before + 6
    assert course.between[1] < course.between[0] + MIB // 8, "less than one of them"
    assert_same(course, expected)


def test_result_when_it_is_saved_after_another_ran_again_in_a_wait_then_it_is_recomputed() -> None:
    def save_both(x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, 1, keepdim=True)
        first = torch.sin(variance)
        del variance
        wait()
        return first + torch.sin(mean)

    course = Course(Apply(save_both))
    expected = plain(course, *[Course.step] * 2)
    with course.running():
        trace = course.record()
        first, second = recompute(*made_by(trace, "var_mean"))
        early = replace(first, prefetch=waits_of(trace)[0])
        with course.following_plan(trace, early, second) as following:
            course.step()
            assert following.end_step().deviation is None
    assert_same(course, expected)


def test_plan_when_it_is_followed_at_any_length_then_no_wait_is_filled() -> None:
    course = WaitingCourse()
    with course.running():
        trace = course.record()
        plan = Plan(decisions=in_wait(trace, 0), budget_bytes=1 << 40)
        following = PlanExecutor(course.swapper, course.model, trace, plan, for_any_length=True)
        following.start()
        course.counts.clear()
        course.step()
        assert course.counts == [0, 0, 0]
        following.stop()


def test_wait_when_there_is_no_room_then_backward_recomputes() -> None:
    course = WaitingCourse()
    expected = plain(course, *[Course.step] * 2)
    limit = in_use(course.installation) + 16 * MIB
    filler: list[torch.Tensor] = []

    def fill_and_wait() -> None:
        filler.append(torch.empty(limit - in_use(course.installation) - 4096, dtype=torch.uint8))
        wait()
        filler.clear()

    with course.running(limit):
        trace = course.record()
        with course.following_plan(trace, *in_wait(trace, 0)) as following:
            course.wait = fill_and_wait  # type: ignore[method-assign]
            course.counts.clear()
            course.step()
            assert course.counts == [0, 0, 0]
            report = following.end_step()
    assert report.deviation is None
    assert report.refused_prefetches == 3
    assert_same(course, expected)


def test_wait_when_an_operand_finds_no_room_then_nobody_hears_of_it_and_backward_recomputes() -> (
    None
):
    def average(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.repeat(64, 1).view(64, *x.shape).mean(0))  # 4 MiB for 64 KiB

    course = WaitingCourse(Apply(average))
    expected = plain(course, *[Course.step] * 2)
    limit = in_use(course.installation) + 16 * MIB
    filler: list[torch.Tensor] = []
    told: list[str] = []

    def fill_and_wait() -> None:
        nbytes = limit - in_use(course.installation) - MIB
        filler.append(torch.empty(nbytes, dtype=torch.uint8))
        wait()
        filler.clear()

    with course.running(limit):
        trace = course.record()
        (result,) = recompute(*made_by(trace, "mean"))
        early = replace(result, prefetch=waits_of(trace)[0])
        course.installation.failures.append(told.append)
        with course.following_plan(trace, early) as following:
            course.wait = fill_and_wait  # type: ignore[method-assign]
            course.step()
            assert following.end_step().deviation is None
        course.installation.failures.remove(told.append)
    assert told == []
    assert_same(course, expected)
