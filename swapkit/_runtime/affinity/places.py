"""The place of a device in its machine: the NUMA node, and the CPUs of that node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swapkit._runtime.affinity.addresses import DEVICES, Npu, cuda_address, list_alike
from swapkit._runtime.affinity.cpu_lists import parse_cpus
from swapkit._runtime.affinity.system import CommandMissing, Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit._runtime.affinity.system import System

NODES = "/sys/devices/system/node"
NO_NODE = -1  # of the kernel: the firmware does not tell
_NODE = re.compile(r"node(\d+)")
_LSPCI_NODE = re.compile(r"^\s*NUMA node:\s*(\d+)\s*$", re.MULTILINE)
_LSCPU_NODE = re.compile(
    r"^\s*NUMA\D*(\d+)[^\d\n]*CPU[^:\n\uff1a]*[:\uff1a][ \t]*(\S*)", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a device is attached.

    Args:
        device: torch's name of it.
        address: its PCI address; None: unknown.
        node: its NUMA node; None: unknown.
        nodes: the CPUs of every node of the machine that has some.
        alike: the addresses of all devices of its type on its node, itself included, in order;
            none: unknown.
        why: what kept the node from being found; empty: it was found.
    """

    device: str
    address: str | None = None
    node: int | None = None
    nodes: Mapping[int, frozenset[int]]
    alike: tuple[str, ...] = ()
    why: str = ""

    @property
    def key(self) -> str:
        """Its address, by which devices are ordered; its name if that is unknown."""
        return self.device if self.address is None else self.address

    @property
    def cpus(self) -> frozenset[int]:
        """The CPUs of its node; none: unknown."""
        return frozenset() if self.node is None else self.nodes.get(self.node, frozenset())

    def __str__(self) -> str:
        address = "" if self.address is None else f" ({self.address})"
        node = "NUMA node unknown" if self.node is None else f"NUMA node {self.node}"
        return f"{self.device}{address}: {node}"


def list_nodes(system: System) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node. Nodes without CPUs, such as a GPU's memory, are left out.

    Raises:
        Unknown: the kernel's files are not readable, and lscpu is not installed or does not answer.
    """
    numbers = [int(found[1]) for name in system.list(NODES) if (found := _NODE.fullmatch(name))]
    nodes = {n: parse_cpus(system.read(f"{NODES}/node{n}/cpulist") or "") for n in numbers}
    if not any(nodes.values()):
        nodes = {int(n): parse_cpus(cpus) for n, cpus in _LSCPU_NODE.findall(system.run("lscpu"))}
    return {n: cpus for n, cpus in sorted(nodes.items()) if cpus}


def find_place(system: System, device_type: str, index: int, properties: Any = None) -> Place:  # noqa: ANN401 - torch's C type
    """Return the place of a device.

    Any thread may call, with no lock held: it takes seconds if commands have to be run.

    Args:
        system: the machine.
        device_type: "cuda" or "npu".
        index: torch's.
        properties: as torch reports them; for "cuda" only.
    """
    device = f"{device_type}:{index}"
    address, node, nodes = None, None, dict[int, frozenset[int]]()
    why = ""
    try:
        nodes = list_nodes(system)
        npu = Npu(system, index) if device_type == "npu" else None
        address = cuda_address(system, properties) if npu is None else npu.address()
        node = _find_node(system, nodes, address, npu)
    except Unknown as unknown:
        why = str(unknown)
    if node is None and len(nodes) == 1:
        (node,), why = nodes, ""
    alike = () if node is None else _list_alike_on(system, device_type, address, node, nodes)
    return Place(device=device, address=address, node=node, nodes=nodes, alike=alike, why=why)


def _find_node(
    system: System, nodes: Mapping[int, frozenset[int]], address: str | None, npu: Npu | None
) -> int:
    """Return a device's node: as the kernel says, else `lspci`, else the device's driver.

    Raises:
        Unknown: none of them tells. A command that does not answer is the last one asked.
    """
    if len(nodes) == 1:
        return next(iter(nodes))
    if not nodes:
        raise Unknown("neither the kernel nor lscpu lists the machine's NUMA nodes")
    missing = None
    try:
        node = None if address is None else _ask_bus(system, address)
    except CommandMissing as error:
        node, missing = None, error
    if node not in nodes:
        near = system.nvidia_cpus(address or "") if npu is None else npu.cpus()
        node = _find_around(nodes, near)
    if node is None:
        raise missing or Unknown(_say_unknown(address))
    return node


def _find_around(nodes: Mapping[int, frozenset[int]], cpus: frozenset[int]) -> int | None:
    """Return the node that all of these CPUs are on; None: there is none."""
    return next((node for node, its_own in nodes.items() if cpus and cpus <= its_own), None)


def _say_unknown(address: str | None) -> str:
    if address is None:
        return "its PCI address is unknown"
    return (
        "the system reports no node, as in many virtual machines. If you know it, let root write "
        f"it to {DEVICES}/{address}/numa_node"
    )


def _ask_bus(system: System, address: str) -> int | None:
    """Return the node of a PCI device; None: there is none.

    Raises:
        Unknown: the kernel's file cannot be read, and lspci is not installed or does not answer.
    """
    file = system.read(f"{DEVICES}/{address}/numa_node")
    if file is not None:
        return int(file) if file.isdecimal() else None
    found = _LSPCI_NODE.search(system.run("lspci", "-s", address, "-vvv"))
    return None if found is None else int(found[1])


def _list_alike_on(
    system: System,
    device_type: str,
    address: str | None,
    node: int,
    nodes: Mapping[int, frozenset[int]],
) -> tuple[str, ...]:
    found = [
        each
        for each in list_alike(system, device_type)
        if len(nodes) == 1 or system.read(f"{DEVICES}/{each}/numa_node") == str(node)
    ]
    return tuple(sorted(found)) if address in found else ()
