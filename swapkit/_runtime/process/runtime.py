"""The state that swapkit shares in one process, with or without an installed pool."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from swapkit._native.backend import ANY_NODE, NUMA_NODES, Backend, Pages
from swapkit._native.sched import Scheduler
from swapkit._runtime.affinity.devices import DevicePlaces
from swapkit._runtime.compiled.registration import watch_compilers
from swapkit._runtime.process.announced_kernels import AnnouncedKernels
from swapkit._runtime.saved.device import CPU, TYPES, Device, DevicePool, SharedState
from swapkit._runtime.saved.eviction import NO_BUDGET, EvictionTerms
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.types import Mover, Placement
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.accelerators import (
    NPU,
    check_storage_layout,
    initialized_accelerator,
)
from swapkit._runtime.torch_compat.wrappers import give_leaves_back
from swapkit.config.allocator_settings import read_allocator_settings
from swapkit.config.environment import apply_log_level, read_environment
from swapkit.ir.plans import Action


class Runtime(SharedState):
    """The module names, the devices, and the swappers of each device."""

    def __init__(self) -> None:
        environment = read_environment()
        apply_log_level(environment)
        self.places = DevicePlaces()
        super().__init__()
        self.active: list[Swapper] = []  # of the sessions that are active on any thread
        self._devices: dict[torch.device, Device] = {}
        # Of all sessions, ended ones too: their graphs may still hold groups that can be moved.
        self._swappers: weakref.WeakSet[Swapper] = weakref.WeakSet()
        self._defaults: dict[Device, Swapper] = {}
        self._kernels = AnnouncedKernels(self)
        self.tracker.note_switch = self._kernels.set_naming
        self.shim.kernels_listen(self._kernels)
        give_leaves_back()
        watch_compilers(self.swapping)

    # ---- devices --------------------------------------------------------------------------------

    def device(self, name: torch.device) -> Device:
        """Return a device; open it on first use.

        Raises:
            Unsupported: its driver is missing.
        """
        with self.lock:
            if name not in self._devices:
                self._devices[name] = Device(self, name, _open_backend(name))
            return self._devices[name]

    @property
    def cpu(self) -> Device:
        """The CPU as a device."""
        return self.device(CPU)

    def host_bytes(self) -> int:
        """Return the bytes of memory of the machine, or of its control group."""
        return self.cpu.backend.memory_info().total_bytes

    def host_node(self, name: torch.device) -> int:
        """Return the NUMA node whose memory suits a device's host copies; `ANY_NODE`: unknown.

        Any thread. The first call for a device may run commands: hold no lock then.
        """
        node = self.places.host_node(name)
        return node if node is not None and node < NUMA_NODES else ANY_NODE

    def attach_pool(self, device: Device, pool: DevicePool) -> None:
        """Attach a pool to a device; its ring records all copies from now on."""
        with self.lock:
            device.pool = pool
            self._kernels.note_pool()
            for swapper in self.swappers(device):
                swapper.mover.pool_address = pool.address

    @contextlib.contextmanager
    def linked(self, device: Device, link: Backend) -> Iterator[None]:
        """Make schedulers created inside the context copy on another backend's streams."""
        usual, default = device.link, self._defaults.pop(device, None)
        device.link = link
        try:
            yield
        finally:
            device.link = usual
            self._defaults.pop(device, None)
            if default is not None:
                self._defaults[device] = default

    # ---- swappers -------------------------------------------------------------------------------

    def new_swapper(
        self, device: Device, scheduler: Scheduler, terms: EvictionTerms = NO_BUDGET
    ) -> Swapper:
        """Return a swapper that takes part in every rescue.

        Raises:
            Unsupported: the device's framework does not store tensors as swapkit expects.
        """
        if device.name.type == NPU.type:
            check_storage_layout(self.shim.storage_description)
        swapper = Swapper(device, scheduler, terms)
        with self.lock:
            self._swappers.add(swapper)
        return swapper

    def swappers(self, device: Device) -> list[Swapper]:
        """Return the swappers of a device. The lock is held."""
        return [each for each in self._swappers if each.device is device]

    def default_swapper(self, device: Device) -> Swapper:
        """Return the swapper for scopes on a device outside of any session.

        Any thread. The first call for a device may run commands: hold no lock then.
        """
        found = self._defaults.get(device)
        if found is not None:
            return found
        self.host_node(device.name)  # `new_scheduler` then gets it without running commands
        with self.lock:
            found = self._defaults.get(device)
            if found is None:
                found = self._defaults[device] = self.new_swapper(device, device.new_scheduler())
            return found

    def other_mover(self, device_type: int, index: int) -> Mover | None:
        """Return the mover of a device; None: there is none."""
        swapper = self.other_swapper(device_type, index)
        return None if swapper is None else swapper.mover

    def other_swapper(self, device_type: int, index: int) -> Swapper | None:
        """Return the swapper that moves the tensors of a device; None: there is none.

        The innermost session on that device, as in `current_swapper`, else the device's default.
        CPU tensors are already in host memory: moving them helps only if the CPU has a pool.
        """
        for sessions in (thread_state.sessions, self.active):
            for swapper in reversed(sessions):
                if (swapper.device.type, swapper.device.index) == (device_type, index):
                    return swapper
        if device_type == TYPES["cpu"]:
            return self.default_swapper(self.cpu) if self.cpu.pool is not None else None
        accelerator = initialized_accelerator()
        if accelerator is not None and device_type == accelerator.number:
            return self.default_swapper(self.device(torch.device(accelerator.type, index)))
        return None

    def swapping(self, tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        """Return hooks that move what autograd saves on a tensor's device to the host."""
        device_type = TYPES.get(tensor.device.type, -1)
        swapper = self.other_swapper(device_type, tensor.get_device())  # -1: the CPU's
        if swapper is None:  # nobody moves tensors there
            return contextlib.nullcontext()
        placement = Placement(Action.SWAP, min_bytes=read_environment().min_swap_bytes)
        return torch.autograd.graph.saved_tensors_hooks(swapper.packer(placement), swapper.unpack)

    def current_device(self) -> Device:
        """Return the current device of the accelerator that torch uses, else the CPU."""
        accelerator = initialized_accelerator()
        return self.cpu if accelerator is None else self.device(accelerator.current_device())

    def current_swapper(self) -> Swapper:
        """Return the swapper for a scope that this thread opens.

        That is the swapper of this thread's innermost session, else of the latest session of the
        process (a session may use many threads), else the current device's default.
        """
        for sessions in (thread_state.sessions, self.active):
            for innermost in sessions[-1:]:  # one read: other threads may leave sessions meanwhile
                return innermost
        return self.default_swapper(self.current_device())

    def make_room(self) -> int:
        """Free the size of the largest saved storage in each session; return the bytes freed.

        For torch's own allocator when memory is short: it does not report which device is affected.
        """
        swappers = [each for each in tuple(self.active) if each.device.makes_reclaimable]
        return sum(each.rescue_bytes(max(1, each.device.largest_bytes)) for each in swappers)


# By `AllocatorSettings.page_policy`.
_PAGES = {"": Pages.HUGE_FIRST, "1g": Pages.GIANT}


def _open_backend(name: torch.device) -> Backend:
    if name.type == "cpu":
        return Backend.cpu()
    if name.type == NPU.type:
        others = [index for index in range(NPU.count()) if index != name.index]
        pages = _PAGES[read_allocator_settings(name.type).page_policy]
        return Backend.ascend(device=name.index, peers=others, pages=pages)
    others = [index for index in range(torch.cuda.device_count()) if index != name.index]
    # Torch copies between GPUs as if each could access all memory of the other. Virtual memory is
    # accessible only to GPUs with direct peer access.
    reach = all(torch.cuda.can_device_access_peer(other, name.index) for other in others)
    return Backend.cuda(device=name.index, peers=others, virtual_memory=reach)


_runtime: Runtime | None = None
_lock = threading.Lock()


def get_runtime() -> Runtime:
    """Return the process's runtime; create it on first use.

    Raises:
        NativeBuildError: the shim could not be compiled; see the message.
    """
    global _runtime  # noqa: PLW0603 - a process has one torch allocator and one autograd
    if _runtime is not None:
        return _runtime
    with _lock:
        if _runtime is None:
            _runtime = Runtime()
        return _runtime
