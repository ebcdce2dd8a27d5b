"""A device's place is found from whatever the machine tells, and odd answers do no harm."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from swapkit._runtime.affinity import devices
from swapkit._runtime.affinity.devices import DevicePlaces
from swapkit._runtime.affinity.places import (
    cuda_address,
    format_cpus,
    list_nodes,
    parse_address,
    parse_cpus,
)
from swapkit.config.environment import CpuAffinity
from tests.machines.recorded import RecordedSystem

VIRTUAL = "0000:08:00.0"


@dataclass(frozen=True)
class Named:
    """What is read of a `torch.device`; a torch without torch_npu has none for an NPU."""

    type: str
    index: int


def npu(index: int) -> torch.device:
    return cast("torch.device", Named("npu", index))


NPU0, NPU4 = npu(0), npu(4)


@pytest.mark.parametrize("text", ["", "N/A", "0-", "1,,2", "a-b", "-1", "0-3 5"])
def test_cpus_when_the_text_is_no_list_then_none(text: str) -> None:
    assert parse_cpus(text) == frozenset()


@pytest.mark.parametrize("text", ["5", "0-3", "0-3,8", "0,2,4", "0-27,56-83"])
def test_cpus_when_parsed_and_formatted_then_the_same(text: str) -> None:
    assert format_cpus(parse_cpus(text)) == text


@pytest.mark.parametrize("text", ["", "NA", "0000:08:00", "08:00.9", "xx:00.0", "0000:08:00.0 x"])
def test_address_when_the_text_is_none_then_none(text: str) -> None:
    assert parse_address(text) is None


def test_cuda_address_when_torch_reports_it_then_in_the_form_of_the_kernel() -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9D, pci_device_id=2)
    assert cuda_address(properties) == "0001:9d:02.0"


def test_node_when_the_kernel_says_minus_one_then_the_driver_is_asked() -> None:
    system = RecordedSystem("dgx_h100")
    system.sections["file /sys/bus/pci/devices/0000:9d:00.0/numa_node"] = "-1"
    assert system.place(4).node is None
    system.sections["near 0000:9d:00.0"] = "56-111,168-223"
    assert system.place(4).node == 1
    system.sections["near 0000:9d:00.0"] = "0-223"  # no single node
    assert system.place(4).node is None


def test_node_when_topo_knows_a_virtual_machines_npu_then_that_one() -> None:
    assert VIRTUAL in RecordedSystem("virtual").place(0).why
    for cpus, node in (("48-71", 2), ("NA", None)):
        system = RecordedSystem("virtual")
        system.sections["command npu-smi info -t topo"] = f"NPU0  X  {cpus}\n"
        assert system.place(0).node == node


@pytest.mark.parametrize("output", ["", "dcmi model initialized failed\n", "\0\n", "NPU ID : 0\n"])
def test_npu_when_npu_smi_answers_oddly_then_the_node_is_unknown(output: str) -> None:
    system = RecordedSystem("kunpeng_910b")
    for key in system.sections:
        if key.startswith("command npu-smi"):
            system.sections[key] = output
    place = system.place(0)
    assert (place.address, place.node) == (None, None)
    assert place.why == "its PCI address is unknown"
    assert system.choose(0).is_shortfall


def test_npu_when_its_board_is_spelt_without_blanks_then_found() -> None:
    system = RecordedSystem("kunpeng_910b")
    system.sections["command npu-smi info -t board -i 0 -c 0"] = "\tPCIeBusInfo : 0000:42:00.0\n"
    assert system.place(0).node == 0


def test_nodes_when_some_have_no_cpus_then_left_out() -> None:
    system = RecordedSystem("dgx_h100")
    system.sections["file /sys/devices/system/node/node2/cpulist"] = "\n"
    assert list(list_nodes(system)) == [0, 1]


def test_nodes_when_neither_the_kernel_nor_lscpu_lists_them_then_a_reason() -> None:
    system = RecordedSystem("kunpeng_910b_hidden_sys")
    system.sections["command lscpu"] = "Architecture: aarch64\n"
    assert "lists the machine's NUMA nodes" in system.place(0).why


def test_nodes_when_lscpu_is_missing_too_then_its_package() -> None:
    system = RecordedSystem("kunpeng_910b_hidden_sys")
    system.sections["missing lscpu"] = ""
    assert system.place(0).why == "lscpu is missing: install the package util-linux"


def test_cores_when_there_are_fewer_than_devices_then_cpus_are_divided() -> None:
    system = RecordedSystem("dgx_h100")
    system.facts["allowed"] = "0-1,112"
    assert [system.cpus(index) for index in range(4)] == ["0", "112", "1", "0"]


@pytest.mark.promise("D8")
def test_host_node_when_the_device_has_one_then_that_and_looked_up_once() -> None:
    system = RecordedSystem("kunpeng_910b")
    places = DevicePlaces(system)
    assert places.host_node(NPU4) == 3
    asked = len(system.asked)
    assert places.host_node(NPU4) == 3
    assert len(system.asked) == asked
    assert places.host_node(torch.device("cpu")) is None
    assert places.place(torch.device("cpu")) is None


@pytest.mark.promise("D8")
def test_devices_when_looked_up_then_each_command_runs_once() -> None:
    system = RecordedSystem("atlas_800i_a2")
    places = DevicePlaces(system)
    for index in range(system.count):
        place = places.place(npu(index))
        assert place is not None
        assert place.node is not None
    assert system.asked.count("npu-smi info -m") == system.asked.count("lscpu") == 1
    assert system.asked.count("npu-smi info -t topo") == 1
    assert len(system.asked) == len(set(system.asked))


@pytest.mark.promise("F12")
@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("kunpeng_910b", "npu-smi"),
        ("kunpeng_910b_hidden_sys", "npu-smi"),
        ("kunpeng_910b_hidden_sys", "lspci"),
        ("kunpeng_910b_hidden_sys", "lscpu"),
    ],
)
def test_devices_when_a_command_hangs_then_its_program_runs_once_and_nothing_after_it(
    name: str, program: str
) -> None:
    system = RecordedSystem(name)
    system.sections[f"hung {program}"] = ""
    places = DevicePlaces(system)
    assert places.host_node(npu(0)) is None
    assert system.asked[-1].startswith(program)
    for index in range(system.count):
        place = places.place(npu(index))
        assert place is not None
        assert place.why == f"{program} did not answer within 10 seconds"
    assert [each.split()[0] for each in system.asked].count(program) == 1
    choice = places.choose(npu(0), CpuAffinity())
    assert choice is not None
    assert choice.is_shortfall
    assert f"{program} did not answer within 10 seconds" in choice.text


class MeetingSystem(RecordedSystem):
    """A machine whose commands end when two threads run them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.meeting = threading.Barrier(2)

    def run_again(self, *command: str) -> str:
        self.meeting.wait(60)  # breaks if one thread waits for the other
        return f"{super().run_again(*command)}\n"


def test_device_when_two_threads_look_it_up_then_neither_waits_and_both_get_one_place() -> None:
    system = MeetingSystem("kunpeng_910b")
    places = DevicePlaces(system)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(system.run, ("npu-smi", "npu-smi"))
        assert first is second
        one, two = threads.map(places.place, (NPU4, NPU4))
    assert one is two is places.place(NPU4)
    assert one is not None
    assert one.node == 3


def test_host_node_when_there_is_only_one_then_npu_smi_is_not_run() -> None:
    system = RecordedSystem("virtual")
    for node in range(1, 8):
        del system.sections[f"file /sys/devices/system/node/node{node}/cpulist"]
    assert DevicePlaces(system).host_node(NPU0) is None
    assert system.asked == []


def test_choice_when_torch_uses_more_threads_than_cpus_then_said_so() -> None:
    before = torch.get_num_threads()
    places = DevicePlaces(RecordedSystem("kunpeng_910b"))
    try:
        torch.set_num_threads(2)
        for count, told in (
            (1, "torch uses 2 threads on the CPU; try torch.set_num_threads(1)"),
            (2, "threads on CPUs 192-193"),
        ):
            choice = places.choose(NPU4, CpuAffinity(cpus_per_device=count))
            assert choice is not None
            assert choice.text.endswith(told)
    finally:
        torch.set_num_threads(before)


@pytest.mark.promise("D8")
def test_gpu_when_torch_reports_its_properties_then_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = RecordedSystem("dgx_h100")
    monkeypatch.setattr(devices, "_properties", system.properties)
    places = DevicePlaces(system)
    gpu = torch.device("cuda", 4)
    assert places.host_node(gpu) == 1
    choice = places.choose(gpu, CpuAffinity())
    assert choice is not None
    assert choice.cpus == parse_cpus("56-69,168-181")
