"""Copies are measured as sessions copy, in the memory that is free, and leave nothing behind."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._native.backend import Backend
from swapkit._native.lib import lib
from swapkit._runtime.machine import bandwidth as speeds
from swapkit._runtime.machine.bandwidth import measure_disk, measure_speeds
from swapkit._runtime.machine.copy_bursts import BurstOut, Lanes
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import Limits
from swapkit.errors import BackendError, DiskError, OutOfHostMemory, OverBudget
from swapkit.testing import slow_link
from tests.support import MIB, limit_above_reserved
from tests.support.instruments import Instrument
from tests.unit._runtime.rig import in_use

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.device import Device

ROOM_BYTES = 256 * MIB
LINK = 200e6


@pytest.fixture
def device() -> Device:
    return get_runtime().cpu


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure one short round."""
    monkeypatch.setattr(speeds, "BURST_SECONDS", 0.001)
    monkeypatch.setattr(speeds, "ROUNDS", 1)


def test_speeds_when_the_link_is_throttled_then_they_are_the_links(device: Device) -> None:
    with slow_link(bytes_per_s=LINK):
        found = measure_speeds(device, room_bytes=ROOM_BYTES, host_bytes=None)
    # No copy is faster than the link. How much slower one is where other programs compute is up to
    # them.
    assert 0 < found.out_bytes_per_second < LINK * 1.05
    assert 0 < found.in_bytes_per_second < LINK * 1.05
    assert 1 <= found.duplex <= 2
    assert found.interference >= 0


def test_speed_when_found_then_latency_and_bytes_are_told_apart() -> None:
    def seconds(nbytes: int) -> float:
        return 0.002 + nbytes / 200e6

    small, large = seconds(speeds.SMALL_BYTES), seconds(4 * MIB)
    found = speeds.find_speed(4 * MIB, [large] * 5, [small, small, 2 * small])
    assert found == pytest.approx((200e6, 0.002))


def test_speed_when_samples_differ_then_a_low_one_is_counted_on() -> None:
    samples = [MIB / (speed * 1e6) for speed in (300, 100, 200, 500, 400)]
    found, latency = speeds.find_speed(MIB + speeds.SMALL_BYTES, samples, [0.0])
    assert found == pytest.approx(200e6)
    assert latency == 0


def test_samples_when_they_agree_but_for_one_then_steady() -> None:
    assert speeds.is_steady([1.0, 1.2, 1.1, 9.0, 1.3])
    assert not speeds.is_steady([1.0, 1.2, 1.6, 1.7, 1.3])


def test_speed_when_the_small_copy_was_the_slower_one_then_still_sound() -> None:
    found, latency = speeds.find_speed(MIB, [0.001], [0.005])
    assert 0 < found < 2 * MIB / 0.001
    assert 0 < latency <= 0.005


@pytest.mark.parametrize("duplex", [1.0, 1.3, 2.0])
@pytest.mark.parametrize(("out", "back"), [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0)])
def test_duplex_when_found_then_that_of_the_machines_model(
    out: float, back: float, duplex: float
) -> None:
    shorter, longer = sorted((out, back))
    both = shorter / (duplex / 2) + longer - shorter
    assert speeds.find_duplex(out, back, both) == pytest.approx(duplex)


def test_duplex_when_noise_goes_beyond_then_held_within_its_range() -> None:
    assert speeds.find_duplex(1.0, 1.0, 5.0) == 1
    assert speeds.find_duplex(1.0, 1.0, 0.7) == 2
    assert speeds.find_duplex(1.0, 3.0, 1.5) == 2


def test_interference_when_samples_are_disturbed_then_the_better_ones_count() -> None:
    beside = [(1.6, 1.0), (1.25, 1.0), (50.0, 1.0), (1.2, 1.0), (1.25, 1.0), (1.25, 1.0)]
    assert speeds.find_interference(1.0, beside) == pytest.approx(0.25)


def test_interference_when_copies_ran_for_a_part_then_told_of_that_part() -> None:
    # Of 1.1 seconds copies ran in 0.6, in which what takes 0.5 without them was computed.
    assert speeds.find_interference(1.0, [(1.1, 0.6 / 1.1)]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("alone", "beside", "expected"),
    [
        (1.0, (0.9, 1.0), 0.0),
        (1.0, (1.0, 0.5), 0.0),
        (1.0, (9.0, 1.0), 1.0),
        (1.0, (1.5, 0.1), 1.0),
        (0.0, (0.0, 0.0), 0.0),
    ],
)
def test_interference_when_it_makes_no_sense_then_held_within_its_range(
    alone: float, beside: tuple[float, float], expected: float
) -> None:
    assert speeds.find_interference(alone, [beside]) == expected


@pytest.mark.usefixtures("quick")
def test_latencies_when_the_link_has_some_then_they_are_found(device: Device) -> None:
    with slow_link(bytes_per_s=1e9, latency_s=0.01):
        found = measure_speeds(device, room_bytes=ROOM_BYTES, host_bytes=None)
    # What a small copy takes: at least the latency, however long it had to wait for a processor.
    out = found.out_latency_seconds + speeds.SMALL_BYTES / found.out_bytes_per_second
    back = found.in_latency_seconds + speeds.SMALL_BYTES / found.in_bytes_per_second
    assert out > 0.0095
    assert back > 0.0095


@pytest.mark.usefixtures("quick")
def test_memory_when_measured_in_a_tight_session_then_nobody_is_rescued(
    installation: Installation,
) -> None:
    device = installation.device
    limit_bytes = limit_above_reserved(installation, 12 * MIB)
    with swapkit.budget(limit_bytes, policy="rescue") as session:
        losses = [torch.ones(MIB // 4, requires_grad=True).exp().sum() for _ in range(2)]
        before = in_use(installation)
        measure_speeds(device, room_bytes=limit_bytes - before, host_bytes=4 * MIB)
        assert in_use(installation) == before
        stats = session.stats
        assert stats.oom_rescues == 0
        assert stats.swapped_out_bytes == 0
        assert stats.peak_bytes <= limit_bytes
    for loss in losses:
        loss.backward()


@pytest.mark.usefixtures("quick")
def test_memory_when_there_is_none_then_refused_without_a_rescue(
    installation: Installation,
) -> None:
    limit_bytes = limit_above_reserved(installation, 4 * MIB)
    with swapkit.budget(limit_bytes, policy="rescue") as session:
        loss = torch.ones(MIB // 4, requires_grad=True).exp().sum()  # what it saved could go
        held = []
        with contextlib.suppress(torch.OutOfMemoryError):  # of what is free, in pieces too small
            while installation.device.has_room(MIB // 8):
                held.append(torch.ones(MIB // 8, dtype=torch.uint8))
        before = session.stats.oom_rescues
        with pytest.raises(OverBudget, match="cannot measure"):
            measure_speeds(installation.device, room_bytes=0, host_bytes=None)
        assert session.stats.oom_rescues == before
    loss.backward()


@pytest.mark.usefixtures("quick")
def test_users_state_when_measured_then_as_before(device: Device) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    scheduler = get_runtime().default_swapper(device).scheduler
    before = scheduler.stats()
    with swapkit.offload():
        measure_speeds(device, room_bytes=ROOM_BYTES, host_bytes=None)
    assert torch.equal(torch.rand(3), expected)
    assert scheduler.stats() == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("nth", [1, 8, 40])
@pytest.mark.usefixtures("quick")
def test_link_when_it_fails_then_the_memory_is_given_back(
    installation: Installation, nth: int
) -> None:
    backend = Instrument.fault(Backend.cpu())
    before = in_use(installation)
    with get_runtime().linked(installation.device, backend):
        backend.arm_fault(nth, forever=True, status=lib.SK_BACKEND_FAILED)
        with pytest.raises(BackendError):
            measure_speeds(installation.device, room_bytes=ROOM_BYTES, host_bytes=None)
        backend.arm_fault(0, forever=False, status=0)
    assert in_use(installation) == before


def test_link_when_the_host_has_no_room_then_the_memory_is_given_back(
    installation: Installation,
) -> None:
    device = installation.device
    before = in_use(installation)
    lanes = Lanes(device, device.new_scheduler(Limits(host_bytes=4096)), MIB)
    burst = BurstOut(lanes, MIB)
    burst.prepare()
    with pytest.raises(OutOfHostMemory):
        burst.queue(0)
    del lanes, burst
    assert in_use(installation) == before


def test_disk_when_the_link_is_slow_then_measured_without_it(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "DISK_SECONDS", 0.001)
    with slow_link(bytes_per_s=1e6):
        write, read = measure_disk(device, tmp_path, room_bytes=ROOM_BYTES, disk_bytes=64 * MIB)
    assert min(write, read) > 2e6


def test_disk_when_it_has_no_room_then_said(device: Device, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="it took 0 B of"):
        measure_disk(device, tmp_path, room_bytes=ROOM_BYTES, disk_bytes=4096)


def test_low_when_few_values_then_near_the_least() -> None:
    assert [speeds.low(range(1, n + 1)) for n in (1, 2, 3, 5, 10)] == [1, 1, 1, 2, 3]
