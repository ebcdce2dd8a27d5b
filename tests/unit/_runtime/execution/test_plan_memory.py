"""Memory while a plan is followed: what it saves, and who else may move anything."""

from __future__ import annotations

import gc
from typing import Any, cast

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.sched import State
from swapkit._runtime.shim.types import NO_LIMIT
from swapkit.ir.plans import Action, Decision
from swapkit.ir.traces import EventKind, Phase
from tests.support import MIB
from tests.support.instruments import Instrument
from tests.unit._runtime.plan_rig import (
    Course,
    States,
    assert_same,
    event_of,
    items,
    made_by,
    plain,
    swap_all,
)

pytestmark = pytest.mark.usefixtures("installation")


def test_budget_when_the_plan_needs_less_then_it_holds_without_a_rescue() -> None:
    course = Course(tokens=2048)
    with course.running():
        course.step()
        trace = course.record()
        ends = {
            storage: max(
                number
                for number, operator in enumerate(trace.operators)
                if operator.phase is Phase.FORWARD and storage in operator.reads + operator.writes
            )
            for storage in items(trace)
        }
        plan = [
            Decision(storage=storage, action=Action.SWAP, release=end + 1)
            for storage, end in ends.items()
        ]

        def peak() -> int:
            gc.collect()
            course.installation.pool.trim()
            course.installation.pool.peak_take()
            course.step()
            peak_bytes: int = course.installation.pool.peak_take()
            return peak_bytes

        without = peak()
        with course.following_plan(trace, *plan) as following:
            within = peak()
            assert following.end_step().deviation is None
    assert within < 0.8 * without
    limit = within + (without - within) // 4
    course.installation.pool.trim()
    with course.running(limit):
        with course.following_plan(trace, *plan) as following:
            course.step()
            assert following.end_step().deviation is None
        assert course.swapper.counters().rescues == 0
        course.installation.pool.trim()
        course.step()
        assert course.swapper.counters().rescues > 0  # it is the plan that makes it fit


def test_write_behind_when_a_plan_is_followed_then_only_the_plan_moves_anything() -> None:
    course = Course()
    course.swapper.mover.watermark_bytes = 0
    with course.running():
        trace = course.record()
        before = course.moved()[0]
        target = made_by(trace, "addmm")[0]
        with course.following_plan(trace, Decision(storage=target, action=Action.SWAP)):
            course.step()
            assert course.moved()[0] - before == trace.storages[target].nbytes
        before = course.moved()[0]
        course.swapper.mover.ahead_bytes = NO_LIMIT
        course.step()
        assert course.moved()[0] - before > trace.storages[target].nbytes


def test_write_behind_when_it_is_held_then_nothing_is_copied_until_it_resumes() -> None:
    course = Course()
    rescue, mover = course.swapper.evictor, course.swapper.mover
    mover.watermark_bytes = 0
    with course.running():
        rescue.hold()
        y = torch.ones(MIB, requires_grad=True).exp().sin()
        mover.copy_ahead()
        course.swapper.scheduler.drain()
        assert course.moved()[0] == 0
        rescue.resume()
        y = y.sin()
        mover.copy_ahead()
        course.swapper.scheduler.drain()
        assert course.moved()[0] > 0
        assert y.requires_grad


def test_release_when_it_was_needed_meanwhile_then_it_stays() -> None:
    slow = Instrument.delay(Backend.cpu())
    course = Course(backend=slow)
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        with course.following_plan(trace, Decision(storage=target, action=Action.SWAP)):
            states = States(course, [event_of(trace, target, EventKind.SAVE)])
            states.drain = lambda: None
            course.hooks.packer.observer = states
            loss = course.forward()
            (packed,) = states.groups.values()
            assert States.state_of(packed) is State.COPYING_OUT
            course.swapper.unpack(cast("Any", packed))  # by a recipe: no event
            slow.release_copies()
            course.swapper.scheduler.drain()
            course.swapper.mover.release_next()
            assert States.state_of(packed) is not State.OUT
            del loss


def test_rescue_when_planned_copies_are_done_then_they_go_and_it_is_none() -> None:
    slow = Instrument.delay(Backend.cpu())
    course = Course(backend=slow)
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        with course.following_plan(trace, Decision(storage=target, action=Action.SWAP)):
            loss = course.forward()
            slow.release_copies()
            course.swapper.scheduler.drain()
            assert course.swapper.rescue_bytes(1) == trace.storages[target].nbytes
            assert course.swapper.counters().rescues == 0
            assert course.swapper.rescue_bytes(1) > 0  # what is kept goes, too
            assert course.swapper.counters().rescues == 1
            del loss


def test_rescue_when_planned_copies_are_under_way_then_it_waits_for_them_and_it_is_none() -> None:
    course = Course(backend=Backend.cpu(copy_bytes_per_s=MIB))
    with course.running():
        trace = course.record()
        target = made_by(trace, "addmm")[0]
        with course.following_plan(trace, Decision(storage=target, action=Action.SWAP)):
            loss = course.forward()
            (group,) = [
                each for each in course.swapper.mover.resident if each.state == State.COPYING_OUT
            ]
            assert course.swapper.rescue_bytes(1) == trace.storages[target].nbytes
            assert group.state == State.OUT
            assert course.swapper.counters().rescues == 0
            del loss


def test_host_when_it_is_full_then_what_does_not_fit_stays() -> None:
    course = Course(host_limit_bytes=MIB)
    expected = plain(course, *[Course.step] * 2)
    with course.running():
        trace = course.record()
        whole = sum(trace.storages[each].nbytes for each in items(trace))
        with course.following_plan(trace, *swap_all(trace)) as following:
            course.step()
            assert following.end_step().deviation is None
        assert 0 < course.moved()[0] <= MIB < whole
    assert_same(course, expected)
