"""The PCI addresses of devices, in the kernel's form: `0000:c1:00.0`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from swapkit._runtime.affinity.cpu_lists import parse_cpus

if TYPE_CHECKING:
    from swapkit._runtime.affinity.system import System

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


def cuda_address(system: System, properties: Any) -> str | None:  # noqa: ANN401 - torch's C type
    """Return the address of a GPU, from the properties that torch reports; None: unknown."""
    bus = getattr(properties, "pci_bus_id", None)
    if isinstance(bus, int):
        domain = int(getattr(properties, "pci_domain_id", 0))
        device = int(getattr(properties, "pci_device_id", 0))
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else system.nvidia_address(str(uuid))


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
