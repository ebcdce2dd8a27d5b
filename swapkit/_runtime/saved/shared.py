"""The state that all devices and swappers of a process share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.shim.library import load_shim
from swapkit._runtime.torch_compat.fork_locks import hold_over_forks

if TYPE_CHECKING:
    import torch

    from swapkit._runtime.shim.types import Mover


class PlannedMove(NamedTuple):
    """One planned move that was carried out, for traces."""

    kind: str  # "release" or "prefetch"
    site: str
    saved_by: int  # the last operator that saved it
    operator: int  # at which it was carried out
    nbytes: int


class SharedState:
    """The shim, the module names and the lock. The only subclass is `process.runtime.Runtime`."""

    def __init__(self) -> None:
        self.shim = load_shim()
        self.tracker = ModuleTracker(self.shim.set_coarse_site)
        # Guards all sessions and the groups that they move. One lock for all: an allocation in one
        # session may ask any other session for bytes.
        self.lock = self.shim.lock()
        # A fork waits for the lock, so the child process always starts with the lock free.
        hold_over_forks(self.lock)
        self.trace: list[PlannedMove] | None = None  # of planned moves; None: not recorded

    def other_mover(self, device_type: int, index: int) -> Mover | None:
        """Return the mover of a device; None: there is none."""
        raise NotImplementedError

    def host_bytes(self) -> int:
        """Return the bytes of memory of the machine, or of its control group."""
        raise NotImplementedError

    def host_node(self, name: torch.device) -> int:
        """Return the NUMA node whose memory suits a device's host copies; `ANY_NODE`: unknown.

        Any thread. The first call for a device may run commands: hold no lock then.
        """
        raise NotImplementedError
