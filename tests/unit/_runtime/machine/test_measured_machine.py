"""A machine is measured once for what its speeds depend on, and remembered until that changes."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._runtime.machine import measured_machine as measuring
from swapkit._runtime.machine.bandwidth import Speeds
from swapkit._runtime.machine.measured_machine import _read as read_cached_machine
from swapkit._runtime.machine.measured_machine import measure_machine
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import Limits
from swapkit._runtime.shim.build import find_cached, shim_name
from swapkit.testing import slow_link
from tests.support import MIB, cache_in, finish_python, start_python

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.saved.device import Device

BUDGET_BYTES = 256 * MIB
SPEEDS = Speeds(
    out_bytes_per_second=3e9,
    in_bytes_per_second=4e9,
    out_latency_seconds=1e-5,
    in_latency_seconds=2e-5,
    duplex=1.5,
    interference=0.1,
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let measuring take no time; the list grows with each."""
    links: list[str] = []

    def measure(device: Device, **_: object) -> Speeds:
        links.append(device.link.settings)
        return replace(SPEEDS, out_bytes_per_second=float(len(links)))

    monkeypatch.setattr(measuring, "measure_speeds", measure)
    return links


@pytest.fixture
def device() -> Device:
    return get_runtime().cpu


@pytest.mark.usefixtures("user_cache")
def test_machine_when_measured_before_then_not_measured_again(
    device: Device, measured: list[str]
) -> None:
    first = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    again = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    assert again == first
    assert len(measured) == 1
    assert (first.in_bytes_per_second, first.in_latency_seconds) == (4e9, 2e-5)
    assert (first.duplex, first.interference) == (1.5, 0.1)


@pytest.mark.usefixtures("user_cache")
def test_machine_when_asked_fresh_then_measured_again_and_remembered(
    device: Device, measured: list[str]
) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    fresh = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES), fresh=True)
    assert fresh.out_bytes_per_second == len(measured) == 2
    assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) == fresh


@pytest.mark.usefixtures("user_cache", "measured")
def test_cache_when_limits_differ_then_they_are_the_callers(device: Device, tmp_path: Path) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    other = read_cached_machine(device, Limits(budget_bytes=MIB, host_bytes=7 * MIB))
    assert other is not None
    assert (other.budget_bytes, other.host_bytes, other.disk_bytes) == (MIB, 7 * MIB, 0)
    assert read_cached_machine(device, Limits(budget_bytes=MIB, disk=tmp_path)) is None


@pytest.mark.usefixtures("user_cache")
def test_cache_when_the_link_has_another_speed_then_not_used(
    device: Device, measured: list[str]
) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    speeds = []
    for bytes_per_s, latency_s in ((1e8, 0), (2e8, 0), (1e8, 0.001), (1e8, 0)):
        with slow_link(bytes_per_s=bytes_per_s, latency_s=latency_s):
            machine = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
            speeds.append(machine.out_bytes_per_second)
    assert speeds == [2, 3, 4, 2]
    assert len(set(measured)) == len(measured) == 4


@pytest.mark.usefixtures("user_cache", "measured")
def test_cache_when_threads_or_torch_differ_then_not_used(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0.0")
        assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) is None
    assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) is not None


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "swapkit machine"}', b"\xff\xfe"])
def test_cache_when_corrupt_then_measured_anew_and_whole_again(
    device: Device, user_cache: Path, measured: list[str], content: bytes
) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    (file,) = user_cache.glob("machine-*.json")
    file.write_bytes(content)
    assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) is None
    machine = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    assert len(measured) == 2
    assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) == machine


@pytest.mark.usefixtures("user_cache")
def test_machine_when_others_disturbed_it_then_returned_but_not_remembered(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = replace(SPEEDS, is_steady=False)
    monkeypatch.setattr(measuring, "measure_speeds", lambda *_, **__: noisy)
    machine = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    assert machine.out_bytes_per_second == SPEEDS.out_bytes_per_second
    assert read_cached_machine(device, Limits(budget_bytes=BUDGET_BYTES)) is None


def test_cache_when_it_cannot_be_written_then_measured_each_time(
    device: Device, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    for _ in range(2):
        measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    assert len(measured) == 2


def test_cache_when_written_then_nothing_half_done_stays(
    device: Device, user_cache: Path, measured: list[str]
) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    assert len(measured) == 1
    assert {file.suffix for file in user_cache.iterdir()} == {".json", ".lock"}


@pytest.mark.usefixtures("user_cache", "measured")
def test_machine_when_measured_then_one_line_is_logged(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swapkit")
    for _ in range(2):
        measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    (record,) = caplog.records
    assert "in 4.00 GB/s" in record.message
    assert "\n" not in record.message


def test_processes_when_they_ask_at_once_then_one_measures(tmp_path: Path) -> None:
    code = """
        import os

        from swapkit._runtime.machine import measured_machine as measuring
        from swapkit._runtime.process.runtime import get_runtime
        from swapkit._runtime.machine.bandwidth import Speeds
        from swapkit._runtime.saved.device import Limits

        own = float(os.getpid())
        measuring.measure_speeds = lambda *_, **__: Speeds(
            out_bytes_per_second=own,
            in_bytes_per_second=own,
            out_latency_seconds=0.0,
            in_latency_seconds=0.0,
            duplex=2.0,
            interference=0.0,
        )
        print(measuring.measure_machine(get_runtime().cpu, Limits(budget_bytes=1 << 28)))
    """
    cache = tmp_path / "swapkit"
    cache.mkdir(mode=0o700)
    get_runtime()
    compiled = find_cached(shim_name())
    assert compiled is not None
    shutil.copy(compiled, cache)  # or each would compile its own
    processes = [start_python(code, **cache_in(tmp_path)) for _ in range(2)]
    first, second = (finish_python(process) for process in processes)
    assert first == second
    assert len(list(cache.glob("machine-*.json"))) == 1


def test_machine_when_another_process_measures_it_then_its_result_is_awaited(
    device: Device, user_cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    (file,) = user_cache.glob("machine-*.json")
    content = file.read_bytes()
    file.unlink()
    (lock,) = user_cache.glob("machine-*.lock")
    with lock.open("w") as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)

        def end_other(_seconds: float) -> None:
            file.write_bytes(content)
            fcntl.flock(other_process, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", end_other)
        assert measure_machine(device, Limits(budget_bytes=BUDGET_BYTES)) == others
    assert len(measured) == 1


def test_machine_when_another_process_does_not_end_then_measured_anyway(
    device: Device, user_cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_machine(device, Limits(budget_bytes=BUDGET_BYTES))
    (lock,) = user_cache.glob("machine-*.lock")
    monkeypatch.setattr(measuring, "PATIENCE_SECONDS", 0.01)
    with lock.open("w") as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)
        measure_machine(device, Limits(budget_bytes=BUDGET_BYTES), fresh=True)
    assert len(measured) == 2


@pytest.mark.usefixtures("user_cache")
def test_disk_when_asked_for_then_its_speeds_and_room_are_known(
    device: Device, measured: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    machine = measure_machine(
        device, Limits(budget_bytes=BUDGET_BYTES, disk=folder, disk_bytes=32 * MIB)
    )
    assert machine.disk_write_bytes_per_second > 0
    assert machine.disk_read_bytes_per_second > 0
    assert machine.disk_bytes == 32 * MIB
    assert list(folder.iterdir()) == []
    whole = measure_machine(device, Limits(budget_bytes=BUDGET_BYTES, disk=folder))
    assert whole.disk_bytes > 32 * MIB
    assert len(measured) == 1
