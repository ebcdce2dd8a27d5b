"""What all devices and swappers of a process share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.shim.library import load_shim
from swapkit._runtime.torch_compat.fork_locks import hold_over_forks

if TYPE_CHECKING:
    from swapkit._runtime.shim.types import Mover


class PlannedMove(NamedTuple):
    """One planned move, as it happened: for traces."""

    kind: str  # "release" or "prefetch"
    site: str
    saved_by: int  # the last operator that saved it
    operator: int  # where it happened
    nbytes: int


class SharedState:
    """The shim, the names of modules, and the lock. `process.runtime.Runtime` is the only one."""

    def __init__(self) -> None:
        self.shim = load_shim()
        self.tracker = ModuleTracker(self.shim.rest_at)
        # Guards the sessions and what they move: one lock for all, since each may be asked for
        # bytes in the middle of another's allocation.
        self.lock = self.shim.lock()
        # A fork waits for the lock and its child gets it free, whichever thread held it.
        hold_over_forks(self.lock)
        self.trace: list[PlannedMove] | None = None  # of planned moves, if somebody wants one

    def other_mover(self, device_type: int, index: int) -> Mover | None:
        """Return who moves the tensors of a device; None: nobody does."""
        raise NotImplementedError

    def host_bytes(self) -> int:
        """Return the memory of the machine, or of the control group."""
        raise NotImplementedError
