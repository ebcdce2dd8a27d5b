"""The place of a device in its machine: its PCI address, its NUMA node, the CPUs of that node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swapkit._runtime.affinity.system import CommandMissing, System, Unknown

# ---- cpu lists -----------------------------------------------------------------------------------
#
# Lists of CPUs as Linux writes them: `0-3,8`.

_LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list; empty: the list is empty or is no list.

    Example:
        >>> sorted(parse_cpus("0-2,5")), parse_cpus("N/A")
        ([0, 1, 2, 5], frozenset())
    """
    text = text.strip()
    if not _LIST.fullmatch(text):
        return frozenset()
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs as a list.

    Example:
        >>> format_cpus({0, 1, 2, 5})
        '0-2,5'
    """
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


# ---- addresses -----------------------------------------------------------------------------------
#
# The PCI addresses of devices, in the kernel's form: `0000:c1:00.0`.

DEVICES = "/sys/bus/pci/devices"
# The vendor's number of each type of device, and the PCI classes of its devices.
KINDS = {"cuda": ("0x10de", ("0x0300", "0x0302")), "npu": ("0x19e5", ("0x1200",))}
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
# "PCIe Bus Info" or "PCIeBusInfo", by product.
_BUS_INFO = re.compile(r"^\s*PCIe\s*Bus\s*Info\s*:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_CHIP = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s+\S", re.MULTILINE)  # of `npu-smi info -m`


def parse_address(text: str) -> str | None:
    """Return a PCI address in the kernel's form; None: the text is none.

    Example:
        >>> parse_address("00000000:1B:00.0"), parse_address("c1:00.0"), parse_address("NA")
        ('0000:1b:00.0', '0000:c1:00.0', None)
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def cuda_address(properties: Any) -> str:  # noqa: ANN401 - torch's C type
    """Return the address of a GPU, from the properties that torch reports."""
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"


class Npu:
    """One Ascend NPU as `npu-smi` names it."""

    def __init__(self, system: System, index: int) -> None:
        """Look it up.

        Args:
            system: the machine.
            index: torch's, among the devices that ASCEND_RT_VISIBLE_DEVICES leaves.

        Raises:
            Unknown: npu-smi is not installed, or does not answer.
        """
        self._system = system
        named = system.environment.get(VISIBLE_NPUS, "").split(",")
        numbers = [int(each) for each in named if each.strip().isdecimal()]
        logical = numbers[index] if index < len(numbers) else index
        chips = {
            int(chip): (int(card), int(on_card))
            for card, on_card, chip in _CHIP.findall(system.run("npu-smi", "info", "-m"))
        }
        self.card, self.chip = chips.get(logical, (logical, 0))

    def address(self) -> str | None:
        """Return its address; None: npu-smi does not tell.

        Raises:
            CommandHung: npu-smi does not answer.
        """
        board = ("npu-smi", "info", "-t", "board", "-i", str(self.card))
        for command in ((*board, "-c", str(self.chip)), board):
            found = _BUS_INFO.search(self._system.run(*command))
            address = None if found is None else parse_address(found[1])
            if address is not None:
                return address
        return None

    def cpus(self) -> frozenset[int]:
        """Return the CPUs near it; none: npu-smi does not tell.

        Raises:
            CommandHung: npu-smi does not answer.
        """
        for line in self._system.run("npu-smi", "info", "-t", "topo").splitlines():
            words = line.split()
            if words and words[0] == f"NPU{self.card}":  # the header may begin with it, too
                cpus = parse_cpus(words[-1])
                if cpus:
                    return cpus
        return frozenset()


def list_alike(system: System, device_type: str) -> list[str]:
    """Return the addresses of all devices of a type in the machine, visible or not, in order."""
    vendor, classes = KINDS[device_type]
    return [
        address
        for address in system.list(DEVICES)
        if system.read(f"{DEVICES}/{address}/vendor") == vendor
        and (system.read(f"{DEVICES}/{address}/class") or "").startswith(classes)
    ]


# ---- places --------------------------------------------------------------------------------------
#
# The place of a device in its machine: the NUMA node, and the CPUs of that node.

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
        address = cuda_address(properties) if npu is None else npu.address()
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
        raise missing or Unknown(_log_unknown(address))
    return node


def _find_around(nodes: Mapping[int, frozenset[int]], cpus: frozenset[int]) -> int | None:
    """Return the node that all of these CPUs are on; None: there is none."""
    return next((node for node, its_own in nodes.items() if cpus and cpus <= its_own), None)


def _log_unknown(address: str | None) -> str:
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
