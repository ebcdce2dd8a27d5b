"""What swapkit's parts share in one process, whether or not its pool stands below torch."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from swapkit._native.backend import Backend
from swapkit._runtime.saved.device import CPU, TYPES, Device
from swapkit._runtime.saved.shared import SharedState
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.thread_state import thread_state
from swapkit.config.environment import apply_log_level, note_without_effect, read_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._native.sched import Scheduler
    from swapkit._runtime.saved.device import DevicePool
    from swapkit._runtime.shim.types import Mover


class Runtime(SharedState):
    """The names of modules, the devices, and who moves what they hold."""

    def __init__(self) -> None:
        environment = read_environment()
        apply_log_level(environment)
        note_without_effect(environment)
        super().__init__()
        self.active: list[Swapper] = []  # of the sessions that are active on any thread
        self._devices: dict[torch.device, Device] = {}
        # Of all sessions, ended ones too: their graphs may still hold what can be moved.
        self._swappers: weakref.WeakSet[Swapper] = weakref.WeakSet()
        self._defaults: dict[Device, Swapper] = {}

    # ---- devices --------------------------------------------------------------------------------

    def device(self, name: torch.device) -> Device:
        """Return a device, opened when it is first needed.

        Raises:
            Unsupported: its driver is not there.
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
        """Return the memory of the machine, or of the control group."""
        return self.cpu.backend.memory_info().total_bytes

    def attach_pool(self, device: Device, pool: DevicePool) -> None:
        """Put a pool below torch on a device; copies are noted in its ring from now on."""
        with self.lock:
            device.pool = pool
            for swapper in self.swappers(device):
                swapper.mover.pool_address = pool.address

    @contextlib.contextmanager
    def linked(self, device: Device, link: Backend) -> Iterator[None]:
        """Let a device's schedulers that are made meanwhile copy over another backend's streams."""
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

    def new_swapper(self, device: Device, scheduler: Scheduler, *, limit_bytes: int = 0) -> Swapper:
        """Return a swapper that takes part in every rescue."""
        swapper = Swapper(device, scheduler, limit_bytes=limit_bytes)
        with self.lock:
            self._swappers.add(swapper)
        return swapper

    def swappers(self, device: Device) -> list[Swapper]:
        """Return who moves what a device holds. The lock is held."""
        return [each for each in self._swappers if each.device is device]

    def default_swapper(self, device: Device) -> Swapper:
        """Return the swapper of scopes on a device outside any session."""
        with self.lock:
            found = self._defaults.get(device)
            if found is None:
                found = self._defaults[device] = self.new_swapper(device, device.new_scheduler())
            return found

    def other_mover(self, device_type: int, index: int) -> Mover | None:
        """Return who moves the tensors of a device; None: nobody does."""
        swapper = self.other_swapper(device_type, index)
        return None if swapper is None else swapper.mover

    def other_swapper(self, device_type: int, index: int) -> Swapper | None:
        """Return whose mover that is.

        The innermost session there, as in `current_swapper`, else the device's own. Memory of the
        CPU is the host's: moving it helps only who has put a pool there.
        """
        for sessions in (thread_state.sessions, self.active):
            for swapper in reversed(sessions):
                if (swapper.device.type, swapper.device.index) == (device_type, index):
                    return swapper
        if device_type == TYPES["cpu"]:
            return self.default_swapper(self.cpu) if self.cpu.pool is not None else None
        if device_type == TYPES["cuda"]:
            return self.default_swapper(self.device(torch.device("cuda", index)))
        return None

    def current_device(self) -> Device:
        """Return where this thread's work goes: a GPU once torch uses one, else the CPU."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self.device(torch.device("cuda", torch.cuda.current_device()))
        return self.cpu

    def current_swapper(self) -> Swapper:
        """Return the swapper of the session that a scope opened here belongs to.

        The innermost one of this thread; else the latest of the process, whose threads may be many;
        outside any session the current device's own.
        """
        for sessions in (thread_state.sessions, self.active):
            for innermost in sessions[-1:]:  # one look: other threads leave theirs meanwhile
                return innermost
        return self.default_swapper(self.current_device())

    def make_room(self) -> int:
        """Free what may be asked for at once where torch's own allocator is short of memory.

        It does not say on which device. Return how many bytes were freed.
        """
        swappers = [each for each in tuple(self.active) if each.device.sets_aside]
        return sum(each.rescue_bytes(max(1, each.device.largest_bytes)) for each in swappers)


def _open_backend(name: torch.device) -> Backend:
    if name.type == "cpu":
        return Backend.cpu()
    others = [index for index in range(torch.cuda.device_count()) if index != name.index]
    # Torch copies from one GPU to another as if both could see all memory; virtual memory can only
    # be had by those that reach it themselves.
    reach = all(torch.cuda.can_device_access_peer(other, name.index) for other in others)
    return Backend.cuda(device=name.index, peers=others, virtual_memory=reach)


_runtime: Runtime | None = None
_lock = threading.Lock()


def get_runtime() -> Runtime:
    """Return the process's runtime, made when it is first needed.

    Raises:
        NativeBuildError: the shim could not be compiled; see the message.
    """
    global _runtime  # noqa: PLW0603 - torch has one allocator, and one autograd, a process
    if _runtime is not None:
        return _runtime
    with _lock:
        if _runtime is None:
            _runtime = Runtime()
        return _runtime
