"""The scheduler's handle: states, owners, tiers, and what a group says when misused."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import ANY_NODE, Backend
from swapkit._native.lib import check, lib
from swapkit._native.sched import Group, Scheduler, State
from swapkit.errors import (
    BackendError,
    DiskError,
    InvalidArgument,
    OutOfDisk,
    OutOfHostMemory,
)
from swapkit.ir.plans import Tier
from tests.support.instruments import Instrument

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024
MIB = 1 << 20
NBYTES = 4096
OWNER = 77


class Owners:
    """Who was dropped, in order."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(self.dropped.append)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0


class Rig:
    """A scheduler, device memory to copy, and the owners that came back."""

    def __init__(self, backend: Instrument, **options: object) -> None:
        self.owners = Owners()
        self.backend = backend
        self.scheduler = Scheduler(backend, drop_owner=self.owners.address, **options)  # type: ignore[arg-type]
        self.device = ctypes.create_string_buffer(bytes(range(256)) * (NBYTES // 256), NBYTES)
        self.back = ctypes.create_string_buffer(NBYTES)

    def group(self, nbytes: int = NBYTES, tier: Tier = Tier.ANY) -> Group:
        return Group(self.scheduler, nbytes, tier)

    def send(self, group: Group) -> None:
        assert group.nbytes <= NBYTES
        group.copy_out(ctypes.addressof(self.device), owner=OWNER, next_use=0)

    def fetch(self, group: Group) -> None:
        group.copy_in(ctypes.addressof(self.back), owner=OWNER + 1, next_use=0)


def unevict(group: Group) -> None:
    check(lib.sk_group_unevict(group._pointer))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Instrument.cpu())
    yield rig
    rig.scheduler.check()


@pytest.fixture
def slow() -> Iterator[Rig]:
    """Copies wait until they are released."""
    rig = Rig(Instrument.delay(Backend.cpu()))
    yield rig
    rig.backend.release_copies()
    rig.scheduler.check()


def test_tiers_when_compared_with_the_header_then_the_same_numbers() -> None:
    assert {tier.name: tier.value for tier in Tier} == {
        "ANY": lib.SK_TIER_ANY,
        "HOST": lib.SK_TIER_HOST,
        "DISK": lib.SK_TIER_DISK,
    }


def test_group_when_it_goes_out_and_back_then_the_bytes_and_states_are_right(rig: Rig) -> None:
    group = rig.group()
    seen = [State(group.state)]
    rig.send(group)
    seen.append(State(group.state))
    group.finish_out()
    seen.append(State(group.state))
    group.evict()
    seen.append(State(group.state))
    rig.fetch(group)
    seen.append(State(group.state))
    group.finish_in()
    seen.append(State(group.state))
    assert seen == [
        State.RESIDENT, State.COPYING_OUT, State.CLEAN, State.OUT, State.COPYING_IN, State.CLEAN,
    ]  # fmt: skip
    assert rig.back.raw == rig.device.raw
    rig.scheduler.drain()
    assert rig.owners.dropped == [OWNER, OWNER + 1]
    stats = rig.scheduler.stats()
    assert stats.copied_out_bytes == stats.copied_in_bytes == NBYTES
    assert stats.groups == 1


@pytest.mark.parametrize("state", list(State))
def test_group_when_in_a_state_then_only_the_allowed_moves_happen(rig: Rig, state: State) -> None:
    def reach() -> Group:
        group = rig.group()
        for step in (rig.send, Group.finish_out, Group.evict, rig.fetch):
            if group.state == state:
                break
            step(group)
        return group

    moves = {
        "copied out": (State.RESIDENT, rig.send),
        "evicted": (State.CLEAN, Group.evict),
        "taken back": (State.OUT, unevict),
        "copied in": (State.OUT, rig.fetch),
    }
    names = {
        State.RESIDENT: "resident", State.COPYING_OUT: "copying out", State.CLEAN: "clean",
        State.OUT: "out", State.COPYING_IN: "copying in",
    }  # fmt: skip
    for what, (needed, move) in moves.items():
        group = reach()
        assert group.state == state
        if state == needed:
            move(group)
            assert group.state != state
        else:
            with pytest.raises(InvalidArgument, match=f"that is {names[state]} cannot be {what}"):
                move(group)
            assert group.state == state


def test_unevict_when_out_then_clean_with_its_copy(rig: Rig) -> None:
    group = rig.group()
    rig.send(group)
    group.finish_out()
    group.evict()
    unevict(group)
    assert group.state == State.CLEAN
    group.evict()
    rig.fetch(group)
    group.finish_in()
    assert rig.back.raw == rig.device.raw


def test_poll_when_the_copy_is_under_way_then_not_ready_and_nothing_is_dropped(slow: Rig) -> None:
    group, second = slow.group(), slow.group()
    slow.send(group)
    slow.send(second)
    assert not group.poll_out()
    assert slow.owners.dropped == []
    assert slow.scheduler.stats().in_flight == 2
    slow.backend.release_copies(1)
    group.finish_out()
    assert slow.owners.dropped == [OWNER]
    assert not second.poll_out()
    slow.backend.release_copies()
    slow.scheduler.drain()
    assert second.poll_out()
    assert slow.scheduler.stats().in_flight == 0


def test_group_when_destroyed_in_flight_then_its_memory_lives_until_the_copy_is_done(
    slow: Rig,
) -> None:
    group = slow.group()
    slow.send(group)
    del group
    gc.collect()
    assert slow.owners.dropped == []
    assert slow.scheduler.stats().host_bytes > 0
    slow.backend.release_copies()
    slow.scheduler.drain()
    assert slow.owners.dropped == [OWNER]
    stats = slow.scheduler.stats()
    assert stats.host_bytes == stats.groups == 0


def test_group_when_destroyed_then_its_host_memory_is_free(rig: Rig) -> None:
    group = rig.group()
    rig.send(group)
    group.finish_out()
    assert rig.scheduler.stats().host_bytes >= NBYTES
    del group
    assert rig.scheduler.stats().host_bytes == 0
    assert rig.scheduler.stats().host_peak_bytes >= NBYTES
    rig.scheduler.trim()
    assert rig.scheduler.stats().host_reserved_bytes == 0


def test_host_address_when_the_copy_is_pinned_to_the_host_then_it_is_there(rig: Rig) -> None:
    group = rig.group(tier=Tier.HOST)
    assert group.host_address == 0
    rig.send(group)
    group.finish_out()
    assert ctypes.string_at(group.host_address, NBYTES) == rig.device.raw
    anywhere = rig.group()
    rig.send(anywhere)
    anywhere.finish_out()
    assert anywhere.host_address == 0


def test_copy_when_the_host_limit_would_be_passed_then_refused_and_the_owner_is_ours() -> None:
    rig = Rig(Instrument.cpu(), host_limit_bytes=128 * KIB)
    large = rig.group(256 * KIB)
    device = ctypes.create_string_buffer(256 * KIB)
    with pytest.raises(OutOfHostMemory):
        large.copy_out(ctypes.addressof(device), owner=OWNER, next_use=0)
    assert large.state == State.RESIDENT
    assert rig.owners.dropped == []
    assert rig.scheduler.stats().copied_out_bytes == 0
    small = rig.group()
    rig.send(small)
    small.finish_out()
    assert rig.scheduler.stats().host_peak_bytes <= 128 * KIB


def test_copy_when_a_call_of_the_backend_fails_then_nothing_is_left() -> None:
    rig = Rig(Instrument.fault(Backend.cpu()))
    warm = rig.group()
    rig.send(warm)
    warm.finish_out()
    failures = 0
    for nth in range(1, 10):
        group = rig.group()
        rig.owners.dropped.clear()
        rig.backend.arm_fault(nth, forever=False, status=lib.SK_BACKEND_FAILED)
        try:
            rig.send(group)
            group.finish_out()
        except BackendError:
            failures += 1
            assert group.state in {State.RESIDENT, State.COPYING_OUT}  # could not be waited for
        else:
            assert group.state == State.CLEAN
        rig.backend.arm_fault(0, forever=False, status=0)
        rig.scheduler.drain()
        del group
        gc.collect()
        assert len(rig.owners.dropped) <= 1
        assert rig.scheduler.stats().groups == 1
        rig.scheduler.check()
    assert failures >= 1


def test_scheduler_when_groups_exist_then_it_outlives_its_handle(rig: Rig) -> None:
    scheduler = Scheduler(rig.backend, drop_owner=rig.owners.address)
    group = Group(scheduler, NBYTES)
    with pytest.raises(InvalidArgument):
        scheduler.close()
    del scheduler
    rig.send(group)
    group.finish_out()
    assert group.state == State.CLEAN


def test_group_when_the_size_is_not_possible_then_refused(rig: Rig) -> None:
    for nbytes in (0, 1 << 62):
        with pytest.raises(InvalidArgument, match="is not possible"):
            rig.group(nbytes)


def test_stall_when_a_copy_is_waited_for_then_it_grows(slow: Rig) -> None:
    assert slow.scheduler.stats().stall_ns == 0
    for _ in range(50):  # on a busy machine the copy may be done before the wait begins
        group = slow.group()
        slow.send(group)
        release = threading.Timer(0.01, slow.backend.release_copies)
        release.start()
        group.finish_out()
        release.join()
        if slow.scheduler.stats().stall_ns > 0:
            return
    pytest.fail("no wait was counted")


# ---- disk ---------------------------------------------------------------------------------------


def test_tier_when_there_is_no_disk_then_refused(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="no disk was given"):
        rig.group(tier=Tier.DISK)


def test_tier_when_disk_then_the_bytes_are_written_and_read_back(tmp_path: Path) -> None:
    rig = Rig(Instrument.cpu(), host_limit_bytes=MIB, disk=tmp_path)
    group = rig.group(tier=Tier.DISK)
    rig.send(group)
    group.finish_out()
    rig.scheduler.drain()
    stats = rig.scheduler.stats()
    assert stats.written_bytes >= NBYTES
    assert stats.disk_bytes >= NBYTES
    assert list(tmp_path.iterdir()) == []  # a file without a name
    group.evict()
    rig.fetch(group)
    group.finish_in()
    assert rig.back.raw == rig.device.raw
    assert rig.scheduler.stats().read_bytes >= NBYTES
    del group
    assert rig.scheduler.stats().disk_bytes == 0


def test_disk_when_its_limit_is_passed_then_out_of_disk_and_still_resident(tmp_path: Path) -> None:
    rig = Rig(Instrument.cpu(), host_limit_bytes=64 * KIB, disk=tmp_path, disk_limit_bytes=64 * KIB)
    groups = [rig.group(tier=Tier.DISK) for _ in range(48)]
    refused = 0
    for group in groups:
        try:
            rig.send(group)
            group.finish_out()
        except OutOfDisk:
            refused += 1
            assert group.state == State.RESIDENT
    assert refused > 0
    rig.scheduler.check()


def test_disk_when_the_folder_is_missing_then_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="nowhere"):
        Rig(Instrument.cpu(), disk=tmp_path / "nowhere")


def policy_at(address: int) -> str:
    """Return the memory policy of the range that an address is in."""
    found = ""
    for line in Path("/proc/self/numa_maps").read_text(encoding="utf-8").splitlines():
        start, policy = line.split(" ", 1)
        if int(start, 16) > address:
            break
        found = policy
    return found


@pytest.mark.promise("D8")
@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel has no NUMA")
@pytest.mark.parametrize(
    ("node", "expected"), [(ANY_NODE, "default "), (0, r"prefer( \(many\))?:0 ")]
)
def test_copy_when_its_host_node_is_known_then_its_memory_prefers_it(
    node: int, expected: str
) -> None:
    backend = Instrument.cpu()
    backend.host_node = node
    rig = Rig(backend)
    group = rig.group(tier=Tier.HOST)
    rig.send(group)
    group.finish_out()
    assert re.match(expected, policy_at(group.host_address))
