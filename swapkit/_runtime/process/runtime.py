"""What swapkit's parts share in one process, whether or not its pool stands below torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._native.backend import Backend
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.saved.device import CPU, TYPES, Device
from swapkit._runtime.shim.library import load_shim
from swapkit.config.environment import apply_log_level, note_without_effect, read_environment

if TYPE_CHECKING:
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import StorageGroup


class Move(NamedTuple):
    """One planned move, as it happened: for traces."""

    kind: str  # "release" or "prefetch"
    site: str
    saved_by: int  # the last operator that saved it
    operator: int  # where it happened
    nbytes: int


class _Entered(threading.local):
    """The swappers of the sessions that were entered on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Swapper] = []


class Runtime:
    """The names of modules, and the devices."""

    def __init__(self) -> None:
        environment = read_environment()
        apply_log_level(environment)
        note_without_effect(environment)
        self.shim = load_shim()
        self.tracker = ModuleTracker(self.shim.rest_at)
        # Guards the sessions and what they move: one lock for all, since each may be asked for
        # bytes in the middle of another's allocation.
        self.lock = self.shim.lock()
        # A fork waits for the lock and its child gets it free, whichever thread held it.
        release = self.lock.release
        os.register_at_fork(
            before=self.lock.acquire, after_in_parent=release, after_in_child=release
        )
        self.entered = _Entered()
        self.active: list[Swapper] = []  # of the sessions that are active on any thread
        self.trace: list[Move] | None = None
        self._devices: dict[torch.device, Device] = {}

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

    def current_device(self) -> Device:
        """Return where this thread's work goes: a GPU once torch uses one, else the CPU."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self.device(torch.device("cuda", torch.cuda.current_device()))
        return self.cpu

    def other_swapper(self, device_type: int, index: int) -> Swapper | None:
        """Return who moves the tensors of a device; None: nobody does.

        The innermost session there, as in `current_swapper`, else the device's own. Memory of the
        CPU is the host's: moving it helps only who has put a pool there.
        """
        for sessions in (self.entered.stack, self.active):
            for swapper in reversed(sessions):
                if (swapper.device.type, swapper.device.index) == (device_type, index):
                    return swapper
        if device_type == TYPES["cpu"]:
            return self.cpu.default_swapper() if self.cpu.pool is not None else None
        if device_type == TYPES["cuda"]:
            return self.device(torch.device("cuda", index)).default_swapper()
        return None

    def current_swapper(self) -> Swapper:
        """Return the swapper of the session that a scope opened here belongs to.

        The innermost one of this thread; else the latest of the process, whose threads may be many;
        outside any session the current device's own.
        """
        for sessions in (self.entered.stack, self.active):
            for innermost in sessions[-1:]:  # one look: other threads leave theirs meanwhile
                return innermost
        return self.current_device().default_swapper()

    def make_room(self) -> int:
        """Free what may be asked for at once where torch's own allocator is short of memory.

        It does not say on which device. Return how many bytes were freed.
        """
        swappers = [each for each in tuple(self.active) if each.device.sets_aside]
        return sum(each.rescue_bytes(max(1, each.device.largest_bytes)) for each in swappers)

    def note(self, kind: str, swapper: Swapper, group: StorageGroup, operator: int) -> None:
        """Remember a planned move, if somebody wants a trace."""
        if self.trace is not None:
            site = swapper.site(group)
            self.trace.append(Move(kind, site, group.operator, operator, group.nbytes))


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
