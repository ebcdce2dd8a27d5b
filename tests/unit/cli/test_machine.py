"""`swapkit machine` prints what is known of this machine, and refuses with a reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from swapkit import cli as command_line
from swapkit._runtime.affinity.devices import CpuChoice
from swapkit._runtime.machine import measured_machine as measuring
from swapkit._runtime.machine.bandwidth import Speeds
from swapkit._runtime.process.runtime import get_runtime
from swapkit.ir.codec import decode_machine, read_machine

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.config.environment import CpuAffinity

SPEEDS = Speeds(
    out_bytes_per_second=3e9,
    in_bytes_per_second=4e9,
    out_latency_seconds=1e-5,
    in_latency_seconds=2e-5,
    duplex=1.5,
    interference=0.1,
)
OPTIONS = ("--device", "cpu", "--budget", "1GiB")


@pytest.fixture(autouse=True)
def measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let measuring take no time; the list grows with each."""
    calls: list[int] = []

    def measure(*_: object, **__: object) -> Speeds:
        calls.append(1)
        return SPEEDS

    get_runtime()  # compiled in the usual cache
    request.getfixturevalue("user_cache")
    monkeypatch.setattr(measuring, "measure_speeds", measure)
    return calls


def test_machine_when_asked_for_then_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["machine", *OPTIONS, "--host-limit", "2GiB"]) == 0
    said = capsys.readouterr().out
    assert "3.00 GB/s, 10.0 us latency per copy" in said
    assert "1.00 GiB" in said
    assert "2.00 GiB" in said


@pytest.mark.promise("D8")
def test_machine_when_its_device_has_a_place_then_where_threads_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(_name: object, asked: CpuAffinity) -> CpuChoice:
        return CpuChoice(text=f"{asked.cpus_per_device} CPUs of NUMA node 3")

    monkeypatch.setenv("CPU_BINDING_NUM", "12")
    monkeypatch.setattr(get_runtime().places, "choose", choose)
    assert command_line.main(["machine", *OPTIONS]) == 0
    assert "\nwith bind_cpus=True: 12 CPUs of NUMA node 3\n" in capsys.readouterr().out


def test_machine_when_asked_for_as_json_then_what_plans_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command_line.main(["machine", *OPTIONS, "--json"]) == 0
    machine = decode_machine(json.loads(capsys.readouterr().out))
    assert (machine.budget_bytes, machine.in_bytes_per_second) == (1 << 30, 4e9)
    file = tmp_path / "machine.json"
    assert command_line.main(["machine", *OPTIONS, "--json", str(file)]) == 0
    assert read_machine(file) == machine
    assert capsys.readouterr().out == ""


def test_machine_when_asked_twice_then_measured_once_unless_fresh(measured: list[int]) -> None:
    for options in ([], [], ["--fresh"]):
        assert command_line.main(["machine", *OPTIONS, *options]) == 0
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--device", "abacus"], "abacus"),
        (["--budget", "much"], "--budget='much'"),
        (["--disk", "no/such/folder"], "expected an existing folder"),
        (["--host-limit", "0"], "--host-limit"),
        (["--json", "no/such/folder/file.json"], "no/such/folder"),
    ],
)
def test_machine_when_something_makes_no_sense_then_status_2_and_the_reason(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["machine", *OPTIONS, *options]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.out == ""
