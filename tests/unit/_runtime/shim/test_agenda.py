"""When groups leave and come back: what scopes, budgets and plans have in common."""

from __future__ import annotations

import pytest

from swapkit._native.backend import Backend
from swapkit._native.sched import State
from tests.support import MIB
from tests.support.instruments import Instrument
from tests.unit._runtime.rig import SWAP, group_of, make_swapper, numbers, save, settle, state_of

pytestmark = pytest.mark.usefixtures("installation")


def test_memory_when_asked_for_then_what_a_scope_sends_out_goes_first_and_that_is_no_rescue() -> (
    None
):
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    kept = save(swapper, 4 * MIB)
    sent = [save(swapper, 4 * MIB, SWAP, seed=seed) for seed in (1, 2)]
    swapper.end_scope()
    assert [state_of(each) for each in sent] == [State.COPYING_OUT] * 2
    slow.release_copies()
    swapper.scheduler.drain()
    assert swapper.rescue_bytes(1) == 4 * MIB
    assert [each.is_stripped for each in sent] == [True, False]  # the oldest
    assert swapper.counters().rescues == 0
    assert swapper.rescue_bytes(8 * MIB) == 8 * MIB
    assert [state_of(each) for each in (*sent, kept)] == [State.OUT] * 3
    assert swapper.counters().rescues == 1


def test_group_when_saved_under_a_budget_and_then_in_a_scope_then_it_leaves_as_the_scope_says() -> (
    None
):
    swapper = make_swapper()
    tensor = numbers(4 * MIB)
    handles = [save(swapper, tensor)]
    assert swapper.mover.dirty_count == 1
    handles.append(save(swapper, tensor, SWAP))
    assert swapper.mover.dirty_count == 0
    assert group_of(handles[0]) is group_of(handles[1])
    settle(swapper)
    assert state_of(handles[0]) is State.OUT
    assert swapper.mover.out == [group_of(handles[0])]


def test_group_when_it_goes_while_it_leaves_then_no_list_has_it() -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    sent = save(swapper, 4 * MIB, SWAP)
    swapper.end_scope()
    assert state_of(sent) is State.COPYING_OUT
    del sent
    assert not swapper.mover.release_next()
    slow.release_copies()
    settle(swapper)
    assert swapper.mover.out == []
