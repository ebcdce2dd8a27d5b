"""The places of this process's devices, and the CPUs that their threads are bound to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from swapkit._runtime.affinity.places import (
    KINDS,
    Place,
    find_place,
    format_cpus,
    list_nodes,
    parse_cpus,
)
from swapkit._runtime.affinity.system import System, Unknown
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS, CUDA
from swapkit.config.environment import CONF, COUNT, CpuAffinity
from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger

# ---- choice --------------------------------------------------------------------------------------
#
# The CPUs that a device's threads are bound to.

CPUS = "/sys/devices/system/cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """The CPUs for a device's threads, and the reason in words.

    Args:
        cpus: None: the threads stay as they are.
        text: for the log and for users.
        is_shortfall: whether a request cannot be met, so that the text is a warning.
    """

    cpus: frozenset[int] | None = None
    text: str
    is_shortfall: bool = False


def choose_cpus(
    system: System,
    place: Place,
    asked: CpuAffinity,
    *,
    visible: Iterable[Place] = (),
) -> CpuChoice:
    """Return the CPUs to bind a device's threads to.

    The CPUs of the device's node are divided among the devices of its type there, in the order of
    their addresses: exactly CPU_BINDING_NUM for each, else all of them, as evenly as whole cores
    can be. Two devices share a core only if there are too few cores. If the process may use only a
    part of the node, somebody (taskset, Slurm, a container) has divided it before: then that part
    is divided among the devices that the process can see. Never more than the process may use.

    Args:
        system: the machine.
        place: of the device.
        asked: the environment's request.
        visible: the places of the devices that this process can see; looked at only if needed.

    Raises:
        InvalidArgument: CPU_BINDING_NUM is larger than the share of each device.
    """
    kind, _, index = place.device.partition(":")
    if asked.is_refused:
        return CpuChoice(text=f"{place}; no threads are bound ({CONF}=0)")
    if asked.mode and kind == "npu":
        return CpuChoice(text=f"{place}; torch_npu binds the threads ({CONF})")
    allowed = system.allowed_cpus()
    if asked.mode and int(index) in asked.ranges:
        return _choose_named(place, asked.ranges[int(index)], allowed)
    if place.node is None:
        return CpuChoice(
            text=f"{place}; no threads are bound: {place.why}. To choose the CPUs, start the "
            "process with taskset or numactl",
            is_shortfall=True,
        )
    usable = place.cpus & allowed
    if not usable:
        return CpuChoice(
            text=f"{place}; no threads are bound: the process may only use the CPUs "
            f"{format_cpus(allowed)}, none of which is on that node",
            is_shortfall=True,
        )
    if len(place.nodes) == 1 and asked.cpus_per_device is None:
        return CpuChoice(text=f"{place}, the only one; there is nothing to bind")
    return _choose_share(system, place, asked, usable, visible)


def _choose_named(place: Place, named: frozenset[int], allowed: frozenset[int]) -> CpuChoice:
    cpus = named & allowed
    if cpus:
        return CpuChoice(cpus=cpus, text=f"{place}; threads on CPUs {format_cpus(cpus)} ({CONF})")
    return CpuChoice(
        text=f"{place}; no threads are bound: {CONF} names the CPUs {format_cpus(named)}, and the "
        f"process may only use {format_cpus(allowed)}",
        is_shortfall=True,
    )


def _choose_share(
    system: System,
    place: Place,
    asked: CpuAffinity,
    usable: frozenset[int],
    visible: Iterable[Place],
) -> CpuChoice:
    kind, _, index = place.device.partition(":")
    sharing: Sequence[str] = place.alike
    if usable != place.cpus or not sharing:
        sharing = sorted(each.key for each in visible if each.node == place.node)
    devices = max(1, len(sharing))
    position = sharing.index(place.key) if place.key in sharing else int(index) % devices
    count = asked.cpus_per_device
    if count is not None and count * devices > len(usable):
        most = len(usable) // devices
        raise InvalidArgument(
            f"{COUNT}={count}: this process may use {len(usable)} CPUs of NUMA node {place.node}, "
            f"to be divided among {devices} {kind} {'device' if devices == 1 else 'devices'}: "
            + (f"choose at most {most}" if most else "unset it, and devices share CPUs")
        )
    cpus = _cut_share(list_cores(system, usable), position, devices, count)
    return CpuChoice(cpus=cpus, text=f"{place}; threads on CPUs {format_cpus(cpus)}")


def _cut_share(
    cores: Sequence[tuple[int, ...]], position: int, devices: int, count: int | None
) -> frozenset[int]:
    """Return the CPUs of the device at a position: `count`, or an even share of all cores."""
    if count is None and len(cores) >= devices:
        share = cores[position * len(cores) // devices : (position + 1) * len(cores) // devices]
        return frozenset().union(*share)
    whole = [] if count is None else _group_cores(cores, count)
    if len(whole) >= devices:
        return whole[position]
    ordered = [cpu for core in cores for cpu in core]
    count = count or max(1, len(ordered) // devices)
    start = position * count % len(ordered)
    return frozenset(ordered[start : start + count])


def _group_cores(cores: Sequence[tuple[int, ...]], count: int) -> list[frozenset[int]]:
    """Return groups of `count` CPUs that share no core. The rest of a group's last core is left."""
    groups: list[frozenset[int]] = []
    group: list[int] = []
    for core in cores:
        group += core
        if len(group) >= count:
            groups.append(frozenset(group[:count]))
            group = []
    return groups


def list_cores(system: System, cpus: frozenset[int]) -> list[tuple[int, ...]]:
    """Return CPUs by core, in order. CPUs of one core compete for its units."""
    cores: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = parse_cpus(system.read(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list") or "")
        cores.setdefault(min(siblings, default=cpu), []).append(cpu)
    return [tuple(core) for _, core in sorted(cores.items())]


# ---- devices -------------------------------------------------------------------------------------
#
# The places of this process's devices, looked up once each.

_log = get_logger("cpus")


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
