"""Moves arrive whole, keep both ends alive, and are counted; interrupted ones harm nobody."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.lib import lib
from swapkit._native.pool import Ring
from swapkit._native.sched import State
from swapkit.errors import BackendError
from tests.support import MIB
from tests.unit._runtime.rig import (
    evict,
    group_of,
    in_use,
    interrupts,
    make_swapper,
    numbers,
    save,
    settle,
    state_of,
    unpack,
)

if TYPE_CHECKING:
    from swapkit._runtime.installation import Installation

pytestmark = pytest.mark.usefixtures("installation")


def test_copy_when_out_and_in_then_the_bytes_are_equal() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    evict(swapper, handle)
    assert swapper.executor.copy_in(group_of(handle))
    swapper.executor.finish_in(group_of(handle))
    handle.fill(swapper._shim)
    assert torch.equal(handle.alias, numbers(4096))
    stats = swapper.executor.stats()
    assert stats.copied_out_bytes == stats.copied_in_bytes == 4096


def test_copy_when_a_ring_is_attached_then_both_directions_are_in_it(
    installation: Installation,
) -> None:
    swapper = make_swapper()
    swapper.executor.pool = installation.pool
    handle = save(swapper, 4096)
    ring = Ring(64)
    installation.pool.attach(ring)
    evict(swapper, handle)
    unpack(swapper, handle)
    installation.pool.detach()
    copies = [event for event in ring.read()[0] if event.kind.name.startswith("COPY")]
    assert [(event.kind.name, event.nbytes) for event in copies] == [
        ("COPY_OUT", 4096),
        ("COPY_IN", 4096),
    ]


def test_copy_when_everyone_else_let_go_then_both_ends_live_until_it_is_done(
    installation: Installation,
) -> None:
    slow = Backend.delay(Backend.cpu())
    swapper = make_swapper(slow)
    before = in_use(installation)
    handle = save(swapper, 4 * MIB)
    assert swapper.copy_out(group_of(handle))
    assert not swapper.executor.poll_out(group_of(handle))
    del handle
    assert in_use(installation) == before + 4 * MIB
    assert swapper.executor.stats().host_bytes > 0
    slow.release_copies()
    swapper.executor.scheduler.drain()
    settle(swapper)
    assert swapper.executor.stats().host_bytes == 0
    assert in_use(installation) == before


def test_copy_out_when_the_host_is_full_then_false_and_the_storage_is_not_held() -> None:
    swapper = make_swapper(host_limit_bytes=MIB)
    handle = save(swapper, 2 * MIB)
    group = group_of(handle)
    assert not swapper.executor.copy_out(group)
    assert group.state == State.RESIDENT
    assert group.is_exclusive()
    assert swapper.executor.stats().copied_out_bytes == 0


def test_copy_out_when_there_is_nothing_to_copy_then_false() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    evict(swapper, handle)
    assert not swapper.executor.copy_out(group_of(handle))
    assert not swapper.executor.finish_out(group_of(save(swapper, 4096)))


def test_copy_when_the_backend_fails_then_nothing_is_left() -> None:
    fault = Backend.fault(Backend.cpu())
    swapper = make_swapper(fault)
    evict(swapper, save(swapper, 4096, seed=9))  # streams and events are there
    failures = 0
    for nth in range(1, 8):
        handle = save(swapper, 4096, seed=nth)
        group = group_of(handle)
        fault.arm_fault(nth, forever=False, status=lib.SK_BACKEND_FAILED)
        try:
            swapper.copy_out(group)
            swapper.executor.finish_out(group)
        except BackendError:
            failures += 1
        fault.arm_fault(0, forever=False, status=0)
        evict(swapper, handle)
        assert state_of(handle) == State.OUT
        assert torch.equal(unpack(swapper, handle), numbers(4096, nth))
    assert failures > 0


def test_copy_in_when_there_is_no_memory_without_effort_then_tentatively_none(
    installation: Installation,
) -> None:
    swapper = make_swapper()
    handle = save(swapper, 8 * MIB)
    evict(swapper, handle)
    installation.pool.trim()
    installation.pool.set_budget(installation.pool.stats()["reserved_bytes.all.current"] or 1)
    try:
        assert not swapper.executor.copy_in(group_of(handle), tentative=True)
        with pytest.raises(torch.OutOfMemoryError):
            swapper.executor.copy_in(group_of(handle))
        assert state_of(handle) == State.OUT
    finally:
        installation.pool.set_budget(0)
    assert swapper.executor.copy_in(group_of(handle), tentative=True)
    assert torch.equal(unpack(swapper, handle), numbers(8 * MIB))


def test_stall_when_a_copy_is_waited_for_then_it_is_counted_for_the_site() -> None:
    slow = Backend.delay(Backend.cpu())
    swapper = make_swapper(slow)
    first, second = save(swapper, 4096), save(swapper, 4096, seed=1)
    first_site, second_site = ((g.tag, g.index) for g in map(group_of, (first, second)))
    assert swapper.executor.stall_seconds == {}
    assert swapper.copy_out(group_of(first))
    slow.release_copies()
    assert swapper.executor.finish_out(group_of(first))
    stalls = swapper.executor.stall_seconds
    assert stalls[first_site] > 0
    assert second_site not in stalls
    assert swapper.executor.stats().stall_ns > 0


@pytest.mark.parametrize("direction", ["out", "in"])
def test_copy_when_interrupted_anywhere_then_the_storage_is_held_as_long_as_needed(
    direction: str, installation: Installation
) -> None:
    swapper = make_swapper()
    before = in_use(installation)
    interruptions = 0
    for nth in range(1, 100):
        handle = save(swapper, 64 * 1024, seed=nth)
        group = group_of(handle)
        if direction == "in":
            evict(swapper, handle)
        copy = swapper.executor.copy_out if direction == "out" else swapper.executor.copy_in
        if not interrupts(nth, partial(copy, group)):
            break
        interruptions += 1
        # What the copy reads and writes is still there, and so is the way to it.
        assert torch.equal(unpack(swapper, handle), numbers(64 * 1024, nth))
        evict(swapper, handle)
        assert torch.equal(unpack(swapper, handle), numbers(64 * 1024, nth))
        assert group.is_exclusive()
    assert interruptions > 3
    del handle, group
    settle(swapper)
    assert in_use(installation) == before
