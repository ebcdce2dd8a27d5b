"""The places of this process's devices, looked up once each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.affinity.addresses import KINDS
from swapkit._runtime.affinity.choice import choose_cpus
from swapkit._runtime.affinity.places import find_place, list_nodes
from swapkit._runtime.affinity.system import System, Unknown
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS, CUDA
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.affinity.choice import CpuChoice
    from swapkit._runtime.affinity.places import Place
    from swapkit.config.cpu_affinity import CpuAffinity

_log = get_logger(__name__)


class DevicePlaces:
    """The places of devices.

    Any thread may call, with no lock held: the first look-up of a device may run commands, which
    takes seconds. Several threads may look a device up at the same time; all get the same place.
    """

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._places: dict[torch.device, Place] = {}

    def place(self, name: torch.device) -> Place | None:
        """Return the place of a device; None: it is the CPU. Torch must use the device already."""
        if name.type not in KINDS:
            return None
        known = self._places.get(name)
        if known is not None:
            return known
        properties = _properties(name.index) if name.type == CUDA.type else None
        found = find_place(self._system, name.type, name.index, properties)
        place = self._places.setdefault(name, found)
        if place is found:
            _log.info("%s%s", place, f": {place.why}" if place.why else "")
        return place

    def choose(self, name: torch.device, asked: CpuAffinity) -> CpuChoice | None:
        """Return the CPUs to bind the threads of a device to; None: it is the CPU.

        Raises:
            InvalidArgument: CPU_BINDING_NUM is larger than the share of each device.
        """
        place = self.place(name)
        if place is None:
            return None
        choice = choose_cpus(self._system, place, asked, visible=self._visible(name.type))
        count, threads = len(choice.cpus or ()), torch.get_num_threads()
        if not 0 < count < threads:
            return choice
        advice = f"torch uses {threads} threads on the CPU; try torch.set_num_threads({count})"
        return replace(choice, text=f"{choice.text}. {advice}")

    def host_node(self, name: torch.device) -> int | None:
        """Return the NUMA node for a device's host copies; None: unknown, or there is only one."""
        if name.type not in KINDS:
            return None
        with suppress(Unknown):
            if len(list_nodes(self._system)) == 1:
                return None  # without asking npu-smi, which is slow
        place = self.place(name)
        return None if place is None else place.node

    def _visible(self, device_type: str) -> Iterator[Place]:
        for index in range(ACCELERATORS[device_type].count()):
            place = self.place(torch.device(device_type, index))
            if place is not None:
                yield place


def _properties(index: int) -> object:
    return CUDA.module.get_device_properties(index)
