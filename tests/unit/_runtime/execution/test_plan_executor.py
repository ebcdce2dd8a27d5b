"""A plan's swaps, carried out event by event."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._native.backend import Backend
from swapkit._native.sched import State
from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit.errors import SessionError
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import EventKind
from tests.support import MIB
from tests.support.instruments import Instrument
from tests.unit._runtime.plan_rig import (
    Apply,
    Course,
    States,
    Twice,
    assert_same,
    event_of,
    forward_end,
    items,
    made_by,
    plain,
    swap_all,
)

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace

pytestmark = pytest.mark.usefixtures("installation")


LONG_NS = 50_000_000


def watch(course: Course, storage_event: int) -> list[State]:
    """Run a step; return where what was saved at an event was after each event from then on."""
    states = States(course, [storage_event])
    course.hooks.packer.observer = states
    course.step()
    course.hooks.packer.observer = None
    return [each[storage_event] for each in states.states[storage_event:]]


# ---- swaps ---------------------------------------------------------------------------------------


@pytest.mark.promise("A1")
def test_plan_when_everything_is_swapped_then_it_is_and_the_numbers_are_the_same() -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 4)
    with course.running():
        trace = course.record()
        end = forward_end(trace)
        swaps = [replace(each, release=end) for each in swap_all(trace)]
        whole = sum(trace.storages[each].nbytes for each in items(trace))
        with course.following_plan(trace, *swaps) as following:
            for number in range(3):
                course.step()
                report = following.end_step()
                assert report.deviation is None
                assert report.events == len(trace.events)
                assert course.moved() == (whole * (number + 1), whole * (number + 1))
        assert course.swapper.counters().rescues == 0
    assert_same(course, expected)


def test_release_when_the_copy_is_not_done_then_it_is_waited_for_at_the_event() -> None:
    slow = Backend.cpu(copy_bytes_per_s=8 * MIB)
    course = Course(backend=slow)
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        late = Decision(storage=target, action=Action.SWAP, release=forward_end(trace))
        saved = event_of(trace, target, EventKind.SAVE)
        last = max(
            number
            for number, event in enumerate(trace.events)
            if event.operator <= forward_end(trace)
        )
        with course.following_plan(trace, late) as following:
            states = States(course, [saved])
            states.drain = lambda: None
            course.hooks.packer.observer = states
            course.step()
            course.hooks.packer.observer = None
            report = following.end_step()
        assert report.deviation is None
        assert states.states[saved][saved] is State.COPYING_OUT
        assert states.states[last][saved] is State.OUT
        assert report.stall_seconds > 0


def test_release_when_the_copy_is_done_before_the_event_then_it_waits_for_the_event() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        named = Decision(storage=target, action=Action.SWAP, release=forward_end(trace))
        saved = event_of(trace, target, EventKind.SAVE)
        last = max(
            number
            for number, event in enumerate(trace.events)
            if event.operator <= forward_end(trace)
        )
        with course.following_plan(trace, named):
            states = watch(course, saved)  # every copy is done when the next event comes
    assert set(states[: last - saved]) == {State.COPYING_OUT}
    assert states[last - saved] is State.OUT


def test_release_when_none_is_named_then_the_copy_being_done_is_enough() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        saved = event_of(trace, target, EventKind.SAVE)
        with course.following_plan(trace, Decision(storage=target, action=Action.SWAP)):
            states = watch(course, saved)
    assert states[0] in {State.COPYING_OUT, State.OUT}
    assert states[2] is State.OUT


def test_prefetch_when_it_is_due_then_it_comes_and_not_before() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        saved = event_of(trace, target, EventKind.SAVE)
        used = event_of(trace, target, EventKind.USE)
        due = used - 6
        operator = trace.events[due].operator
        decision = Decision(
            storage=target, action=Action.SWAP, release=forward_end(trace), prefetch=operator
        )
        with course.following_plan(trace, decision) as following:
            states = watch(course, saved)
            report = following.end_step()
    same = [n for n, event in enumerate(trace.events) if event.operator == operator]
    assert states[same[-1] - 1 - saved] is State.OUT
    assert states[same[-1] - saved] is State.COPYING_IN
    assert states[used - saved] is State.CLEAN
    assert (report.late_prefetches, report.refused_prefetches) == (0, 0)


def test_prefetch_when_none_is_named_then_it_comes_where_it_is_used() -> None:
    # No copy is done before this thread looks for it, however late that comes to run.
    course = Course(backend=Backend.cpu(copy_latency_ns=LONG_NS))
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        saved = event_of(trace, target, EventKind.SAVE)
        used = event_of(trace, target, EventKind.USE)
        end = forward_end(trace)
        swaps = [replace(each, release=end) for each in swap_all(trace)]
        with course.following_plan(trace, *swaps) as following:
            states = watch(course, saved)
            report = following.end_step()
    assert states[used - 1 - saved] is State.OUT
    assert states[used - saved] is State.CLEAN
    assert report.late_prefetches == len(swaps)
    assert report.stall_seconds > 0


class Asking(Course):
    """Asks its swapper for room in backward, as above an allocator that is not ours."""

    def backward(self, loss: torch.Tensor) -> None:
        mover = self.swapper.mover
        address, mover.pool_address = mover.pool_address, 0
        super().backward(loss)
        mover.pool_address = address


def test_prefetch_when_there_is_no_room_then_it_is_tried_again_at_each_event() -> None:
    course = Asking()
    device = course.installation.device
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        saved = event_of(trace, target, EventKind.SAVE)
        used = event_of(trace, target, EventKind.USE)
        decision = Decision(
            storage=target,
            action=Action.SWAP,
            release=forward_end(trace),
            prefetch=trace.events[used - 8].operator,
        )
        asked: list[int] = []

        def has_room(nbytes: int) -> bool:
            asked.append(nbytes)
            return len(asked) > 3

        course.swapper.has_room = has_room  # type: ignore[method-assign]
        with course.following_plan(trace, decision) as following:
            states = watch(course, saved)
            report = following.end_step()
    assert device.budget_bytes == 0
    assert asked == [trace.storages[target].nbytes] * 4
    assert states.count(State.COPYING_IN) > 0
    assert report.refused_prefetches == 3


def test_prefetch_when_there_is_no_room_then_what_was_copied_makes_it() -> None:
    # No copy is done before this thread looks for it, as above.
    course = Asking(backend=Backend.cpu(copy_latency_ns=LONG_NS))
    with course.running():
        trace = course.record()
        first, *_, target = made_by(trace, "addmm")
        used = event_of(trace, target, EventKind.USE)
        late = event_of(trace, first, EventKind.USE) - 2
        decisions = (
            Decision(storage=first, action=Action.SWAP, release=trace.events[late].operator),
            Decision(
                storage=target,
                action=Action.SWAP,
                release=forward_end(trace),
                prefetch=trace.events[used - 2].operator,
            ),
        )
        states = States(course, [event_of(trace, first, EventKind.SAVE)])
        (saved,) = states.events

        def has_room(nbytes: int) -> bool:
            return nbytes > 0 and States.state_of(states.groups[saved]) is State.OUT

        course.swapper.has_room = has_room  # type: ignore[method-assign]
        with course.following_plan(trace, *decisions) as following:
            course.hooks.packer.observer = states
            course.step()
            course.hooks.packer.observer = None
            report = following.end_step()
    assert used < late
    assert states.states[used - 4][saved] is State.COPYING_OUT
    assert states.states[used][saved] is State.OUT
    assert report.refused_prefetches == 0
    assert report.late_prefetches == 1  # of the first, which comes where it is used


# ---- backward passes without hooks ---------------------------------------------------------------


def test_backward_when_a_step_was_rescued_then_hooks_see_the_next_one() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace) as following:
            skips = []
            for rescues in (0, 1, 0):
                course.step()
                course.swapper.evictor._count += rescues
                assert following.end_step().deviation is None
                skips.append(course.hooks.packer.skips_backward)
    assert skips == [True, False, True]


# ---- life ----------------------------------------------------------------------------------------


def test_stop_when_a_step_is_under_way_then_what_is_out_comes_back() -> None:
    course = Course()
    expected = plain(course, *[Course.step] * 2)
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *swap_all(trace)) as following:
            loss = course.forward()
            course.swapper.scheduler.drain()
        assert course.swapper.mover.follower is None
        assert course.swapper.mover.out
        course.backward(loss)
        del loss
        course.end()
        with pytest.raises(SessionError):
            following.end_step()
    assert_same(course, expected)


def test_following_when_all_is_gone_then_so_is_its_memory() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *swap_all(trace)) as following:
            course.step()
            following.end_step()
    known = weakref.ref(following)
    scheduler = weakref.ref(course.swapper.scheduler)
    del following, course
    gc.collect()
    assert known() is None
    assert scheduler() is None


def test_following_when_the_swapper_is_of_no_session_then_refused() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        course.swapper.events = None
        with pytest.raises(SessionError):
            PlanExecutor(course.swapper, course.model, trace, Plan(decisions=(), budget_bytes=1))


# ---- scopes --------------------------------------------------------------------------------------


class SaveAgain:
    """A function that also saves in a scope what it has saved before, once that is on."""

    is_on = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.cos()
        with swapkit.offload(min_bytes=1):
            again = (y if self.is_on else y.detach()).square()
        return z + again


def save_again(course: Course) -> None:
    course.model[0].function.is_on = True  # type: ignore[index]


def late_release_of(trace: Trace) -> Decision:
    return Decision(
        storage=made_by(trace, "aten.sin")[0], action=Action.SWAP, release=forward_end(trace)
    )


def test_storage_when_saved_again_in_a_scope_then_it_leaves_as_the_scope_says() -> None:
    course = Course(nn.Sequential(Apply(SaveAgain()), Twice()))
    expected = plain(course, Course.step, save_again, Course.step)
    with course.running():
        trace = course.record()
        late = late_release_of(trace)
        saved = event_of(trace, late.storage, EventKind.SAVE)
        save_again(course)
        with course.following_plan(trace, late) as following:
            states = watch(course, saved)
            assert following.end_step().deviation is None
    ends = [n for n, event in enumerate(trace.events) if event.operator <= forward_end(trace)]
    assert State.OUT in states[: ends[-1] - saved]
    assert_same(course, expected)


def test_storage_when_saved_again_in_a_scope_and_the_plan_ends_then_it_leaves_all_the_same() -> (
    None
):
    held = Instrument.delay(Backend.cpu())
    course = Course(nn.Sequential(Apply(SaveAgain()), Twice()), backend=held)
    with course.running():
        trace = course.record()
        late = late_release_of(trace)
        saved = event_of(trace, late.storage, EventKind.SAVE)
        save_again(course)
        with course.following_plan(trace, late):
            states = States(course, [saved])
            course.hooks.packer.observer = states
            states.drain = lambda: None
            y = course.model(course.batch())  # not the loss, where the plan would wait for it
            course.hooks.packer.observer = None
        packed = states.groups[saved]
        assert States.state_of(packed) is State.COPYING_OUT
        held.release_copies()
        course.swapper.scheduler.drain()
        with swapkit.offload(min_bytes=1):  # at whose end all that scopes send out leaves
            pass
        assert States.state_of(packed) is State.OUT
        y.sum().backward()
