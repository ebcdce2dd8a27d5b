"""What is bound where on recorded machines (`tests/machines`)."""

from __future__ import annotations

import re

import pytest

from swapkit._runtime.affinity.devices import list_cores
from swapkit._runtime.affinity.places import parse_cpus
from swapkit.errors import InvalidArgument
from tests.machines.__main__ import format_machines
from tests.machines.recorded import NAMES, RecordedSystem

KUNPENG = "64-95 96-127 0-31 32-63 192-223 224-255 128-159 160-191"
BOUND = {
    "kunpeng_910b": KUNPENG,
    "kunpeng_910b_hidden_sys": KUNPENG,
    "kunpeng_910b_no_lspci": "- - - - - - - -",
    "kunpeng_910b_no_npu_smi": "- - - - - - - -",
    "atlas_800i_a2": "144-155 156-167 96-107 108-119 0-11 12-23 48-59 60-71",
    "dgx_h100": "0-13,112-125 14-27,126-139 28-41,140-153 42-55,154-167 "
    "56-69,168-181 70-83,182-195 84-97,196-209 98-111,210-223",
    "slurm_a100": "0-3,56-59 4-7,60-63 8-11,64-67 12-15,68-71 - - - -",
    "workstation": "-",
    "virtual": "-",
}


@pytest.mark.promise("D8")
@pytest.mark.parametrize("name", NAMES)
def test_machine_when_recorded_then_threads_are_bound_on_the_node_of_each_device(name: str) -> None:
    expected = BOUND[name].split()
    system = RecordedSystem(name)
    assert len(expected) == system.count
    for index, cpus in enumerate(expected):
        place = system.place(index)
        assert (system.cpus(index) or "-") == cpus
        assert parse_cpus(cpus) <= place.cpus


@pytest.mark.parametrize("name", NAMES)
def test_machine_when_recorded_then_no_two_devices_share_a_cpu(name: str) -> None:
    for variables in ({}, {"CPU_BINDING_NUM": "2"}):
        system = RecordedSystem(name, variables)
        bound = [system.choose(index).cpus or frozenset() for index in range(system.count)]
        assert len(frozenset().union(*bound)) == sum(map(len, bound))
        assert all(cpus <= system.allowed_cpus() for cpus in bound)


def test_table_when_printed_then_a_row_for_each_device() -> None:
    text = format_machines()
    assert text.count("\nnpu:") + text.count("\ncuda:") == sum(
        RecordedSystem(name).count for name in NAMES
    )


@pytest.mark.promise("F12")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kunpeng_910b_no_lspci", "lspci is missing: install the package pciutils"),
        ("kunpeng_910b_no_npu_smi", "npu-smi is missing: it comes with the Ascend driver"),
    ],
)
def test_machine_when_a_command_is_missing_then_one_line_names_its_package(
    name: str, said: str
) -> None:
    choice = RecordedSystem(name).choose(0)
    assert choice.cpus is None
    assert choice.is_shortfall
    assert said in choice.text
    assert "\n" not in choice.text


@pytest.mark.promise("F12")
def test_machine_when_the_kernel_tells_then_lspci_is_not_needed() -> None:
    system = RecordedSystem("kunpeng_910b")
    assert system.place(4).node == 3
    assert not any(command.startswith("lspci") for command in system.asked)


@pytest.mark.promise("D8")
@pytest.mark.parametrize(
    ("name", "index", "count", "cpus"),
    [
        ("kunpeng_910b", 4, 12, "192-203"),
        ("kunpeng_910b", 5, 12, "204-215"),
        ("kunpeng_910b", 5, 32, "224-255"),
        ("kunpeng_910b", 5, 1, "193"),
        ("dgx_h100", 1, 4, "2-3,114-115"),
        ("dgx_h100", 0, 3, "0-1,112"),  # and CPU 113 stays idle
        ("dgx_h100", 1, 3, "2-3,114"),
        ("dgx_h100", 3, 1, "3"),
        ("dgx_h100", 7, 28, "98-111,210-223"),
        ("workstation", 0, 4, "0-1,8-9"),
    ],
)
def test_binding_num_when_set_then_each_device_has_that_many_cpus(
    name: str, index: int, count: int, cpus: str
) -> None:
    assert RecordedSystem(name, {"CPU_BINDING_NUM": str(count)}).cpus(index) == cpus


@pytest.mark.promise("D8")
@pytest.mark.parametrize("name", NAMES)
def test_binding_num_when_it_can_be_met_then_exactly_that_many_cpus_and_no_shared_core(
    name: str,
) -> None:
    for count in range(1, 34):
        system = RecordedSystem(name, {"CPU_BINDING_NUM": str(count)})
        owners: dict[tuple[int, ...], int] = {}
        for index in range(system.count):
            try:
                cpus = system.choose(index).cpus
            except InvalidArgument as error:
                (most,) = re.findall(r"choose at most (\d+)$", str(error))
                assert int(most) < count
                continue
            if cpus is not None:
                assert len(cpus) == count
                for core in list_cores(system, system.place(index).cpus):
                    assert not cpus.intersection(core) or owners.setdefault(core, index) == index


@pytest.mark.parametrize(
    ("count", "cpus"),
    [(1, ["0", "56", "1", "57"]), (None, ["0", "56", "1", "57"])],
)
def test_share_when_there_are_fewer_cores_than_devices_then_they_share_cores_and_no_cpu(
    count: int | None, cpus: list[str]
) -> None:
    system = RecordedSystem("slurm_a100", {} if count is None else {"CPU_BINDING_NUM": str(count)})
    system.facts["allowed"] = "0-2,56-58"
    assert [system.cpus(index) for index in range(4)] == cpus


@pytest.mark.promise("D8")
@pytest.mark.parametrize(
    ("name", "index", "count", "allowed", "told"),
    [
        (
            "kunpeng_910b",
            4,
            33,
            "0-255",
            "this process may use 64 CPUs of NUMA node 3, to be divided among 2 npu devices: "
            "choose at most 32",
        ),
        (
            "workstation",
            0,
            17,
            "0-15",
            "this process may use 16 CPUs of NUMA node 0, to be divided among 1 cuda device: "
            "choose at most 16",
        ),
        (
            "slurm_a100",
            0,
            1,
            "0-1",
            "this process may use 2 CPUs of NUMA node 0, to be divided among 4 cuda devices: "
            "unset it, and devices share CPUs",
        ),
    ],
)
def test_binding_num_when_there_are_too_few_cpus_then_refused_with_the_figures(
    name: str, index: int, count: int, allowed: str, told: str
) -> None:
    system = RecordedSystem(name, {"CPU_BINDING_NUM": str(count)})
    system.facts["allowed"] = allowed
    with pytest.raises(InvalidArgument) as refused:
        system.choose(index)
    assert str(refused.value) == f"CPU_BINDING_NUM={count}: {told}"


@pytest.mark.promise("D8")
def test_conf_when_it_names_cpus_then_these_where_torch_npu_does_not_bind_itself() -> None:
    named = {"CPU_AFFINITY_CONF": "1,npu0:3-5,npu0:200"}
    assert RecordedSystem("dgx_h100", named).cpus(0) == "3-5,200"
    assert RecordedSystem("dgx_h100", named).cpus(1) == "14-27,126-139"
    torch_npus = RecordedSystem("kunpeng_910b", named).choose(0)
    assert torch_npus.cpus is None
    assert "torch_npu binds the threads (CPU_AFFINITY_CONF)" in torch_npus.text
    assert not torch_npus.is_shortfall


def test_conf_when_it_names_cpus_that_the_process_may_not_use_then_none() -> None:
    choice = RecordedSystem("slurm_a100", {"CPU_AFFINITY_CONF": "1,npu0:16-20"}).choose(0)
    assert choice.cpus is None
    assert choice.is_shortfall
    assert "names the CPUs 16-20, and the process may only use 0-15,56-71" in choice.text


def test_part_of_a_node_when_few_devices_are_visible_then_divided_among_them() -> None:
    system = RecordedSystem("slurm_a100")
    system.facts["devices"] = "cuda 2"
    assert [system.cpus(index) for index in range(2)] == ["0-7,56-63", "8-15,64-71"]


def test_conf_when_off_then_nothing_is_bound() -> None:
    choice = RecordedSystem("dgx_h100", {"CPU_AFFINITY_CONF": "0"}).choose(0)
    assert choice.cpus is None
    assert not choice.is_shortfall


def test_npu_when_devices_are_hidden_then_numbered_as_torch_numbers_them() -> None:
    system = RecordedSystem("kunpeng_910b", {"ASCEND_RT_VISIBLE_DEVICES": "6,4"})
    assert (system.place(0).address, system.place(1).address) == ("0000:c1:00.0", "0000:96:00.0")
    assert system.cpus(1) == "192-223"
