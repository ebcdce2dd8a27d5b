"""A device's pool below torch, and the sessions that act on it.

There is one pool a device and process: torch has one allocator. It stays for the life of the
process, since tensors live in it; uninstalling only lets new tensors go elsewhere.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol

import torch
from typing_extensions import TypeVar

from swapkit._native.entry import AllocatorEntry
from swapkit._native.pool import BlockState, Pool
from swapkit._runtime.allocators.advice import advise_here
from swapkit._runtime.allocators.memory_holders import find_holders
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.undo import raise_first
from swapkit._runtime.torch_compat.internals import current_node
from swapkit._runtime.torch_compat.isolation import hide, untraced
from swapkit.config.allocator_settings import read_allocator_settings
from swapkit.errors import OverBudget, SessionError
from swapkit.reporting.text import AllocationFailure, format_failure
from swapkit.units import format_bytes, format_limit

if TYPE_CHECKING:
    from types import FrameType

    from swapkit._runtime.model.tracker import ModuleTracker
    from swapkit._runtime.saved.device import Device, DevicePool

# Files that are not the user's.
_INTERNAL = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")


class ActiveSession(Protocol):
    """A session, as the installation sees it."""

    limit_bytes: int

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device; return how many, 0 for none."""

    def hints(self, needed_bytes: int) -> list[str]:
        """Return what a user could do when memory is out, and so many bytes were needed."""

    def note_peak(self) -> None:
        """Count the pool's peak since it was last asked."""

    def add_peak(self, peak_bytes: int) -> None:
        """Note that so many bytes were reserved while the session was active."""

    def close(self) -> list[BaseException]:
        """End the session, from any thread; return what was raised on the way."""


_Pool = TypeVar("_Pool", bound="DevicePool", default=Pool)


class Installation(Generic[_Pool]):
    """A device's pool, and the sessions that act on it."""

    def __init__(self, device: Device, pool: _Pool) -> None:
        self.device = device
        self.pool = pool
        self.runtime = get_runtime()
        self.tracker = self.runtime.tracker
        self.lock = self.runtime.lock
        self.limit_bytes = 0  # set by the user for the whole process; 0: none
        self.sessions: list[ActiveSession] = []  # innermost last
        self.active = False  # whether new tensors come from the pool
        self.runtime.attach_pool(device, pool)
        atexit.register(self.detach_callbacks)

    @property
    def total_bytes(self) -> int:
        """What the device has."""
        return self.device.backend.memory_info().total_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Set a limit of the process's own, whatever sessions ask for; 0: none.

        Raises:
            OverBudget: more than that is in use and cannot be freed; nothing was changed.
        """
        with self.lock:
            self._apply(limit_bytes, self.sessions)
            (self.tracker.start if limit_bytes else self.tracker.stop)(self)
            self.limit_bytes = limit_bytes

    def require_no_session(self) -> None:
        """Refuse what is not possible inside a session.

        Raises:
            SessionError: one is active.
        """
        if self.sessions:
            raise SessionError(
                "swapkit cannot be uninstalled inside `with swapkit.budget(...)`: end what "
                "swapkit.sessions() returns by close(), or call swapkit.uninstall(force=True)"
            )

    def end_sessions(self) -> None:
        """End every session, the innermost first. What one raises is raised after the last."""
        raise_first([error for session in reversed(self.sessions) for error in session.close()])

    def drop_limit(self) -> None:
        """Lift the process's own limit, and give what is cached to the device."""
        self.set_limit(0)
        self.pool.trim()

    def enter(self, session: ActiveSession) -> None:
        """Apply a session's limit; the tightest of all limits holds.

        Raises:
            OverBudget: more than that is in use and cannot be freed; nothing was changed.
        """
        with self.lock:
            sessions = [*self.sessions, session]
            self._apply(self.limit_bytes, sessions)
            self.sessions = sessions
            self.pool.set_rescue(self._rescue)

    def leave(self, session: ActiveSession) -> None:
        """Undo `enter`."""
        with self.lock:
            self.sessions = [other for other in self.sessions if other is not session]
            self._apply(self.limit_bytes, self.sessions)
            if not self.sessions:
                self.pool.set_rescue(None)

    def _apply(self, limit_bytes: int, sessions: list[ActiveSession]) -> None:
        limits = [session.limit_bytes for session in sessions]
        limits += [limit_bytes] if limit_bytes else []
        budget_bytes = min(limits, default=0)
        while not self._fits(budget_bytes):
            reserved_bytes = self.pool.stats()["reserved_bytes.all.current"]
            if self._rescue(reserved_bytes - budget_bytes) == 0:
                raise OverBudget(self._describe_excess(budget_bytes))

    def _fits(self, budget_bytes: int) -> bool:
        """Set the pool's budget if what is in use allows it."""
        try:
            self.pool.set_budget(budget_bytes)
        except OverBudget:
            return False
        self.device.budget_bytes = budget_bytes
        return True

    def _describe_excess(self, budget_bytes: int) -> str:
        holders = ", ".join(
            f"{format_bytes(holder.nbytes)} {holder.name}"
            for holder in find_holders(self.device, self.tracker)[:3]
        )
        in_use = format_bytes(self.pool.in_use_bytes())
        return (
            f"a budget of {format_bytes(budget_bytes)} is not possible: {in_use} are in use "
            f"already ({holders}). Give a larger budget, or free tensors first."
        )

    @untraced
    def _rescue(self, needed_bytes: int) -> int:
        """Ask the sessions, innermost first.

        Called on the thread that allocates, any one, in the middle of an operator or of backward;
        no lock is held but those that the thread itself holds.
        """
        for session in reversed(self.sessions):
            freed = session.rescue(needed_bytes)
            if freed > 0:
                return freed
        with self.lock:
            others = self.runtime.swappers(self.device)
        freed = next(filter(None, (each.rescue_bytes(needed_bytes) for each in others)), 0)
        return freed or self._collect_garbage()

    def _collect_garbage(self) -> int:
        """Free what only cycles hold, before the allocation fails; return the bytes.

        Runs the user's finalizers in the middle of an operator: hidden from modes, as all that is
        done there. Not while this thread holds the runtime's lock: a finalizer may wait for another
        thread, and that one for the lock.
        """
        if self.lock.is_owned():
            return 0
        before_bytes = self.pool.in_use_bytes()
        hide(gc.collect)
        return max(0, before_bytes - self.pool.in_use_bytes())

    def explain(self, nbytes: int) -> str:
        """Return what an allocation of `nbytes` that failed should say.

        Called as `_rescue` is. Other threads may be in the middle of anything: `memory_holders.py`.
        """
        stats = self.pool.stats()
        in_use_bytes = stats["allocated_bytes.all.current"]
        hints = advise_here(stats)
        for session in reversed(self.sessions):
            hints += session.hints(in_use_bytes + nbytes)
        if not self.sessions:
            hints += [
                "train inside `with swapkit.budget(limit, model, optimizer):`, which moves saved "
                "tensors to the host instead of failing",
                f"a limit of at least {format_limit(in_use_bytes + nbytes)}, or a smaller batch or "
                "sequence",
            ]
        blocks = self.pool.blocks()
        return format_failure(
            AllocationFailure(
                asked=nbytes,
                where=_describe_place(self.tracker),
                in_use=in_use_bytes,
                reserved=stats["reserved_bytes.all.current"],
                budget=stats["budget_bytes"],
                device=_label(self.device.name),
                device_bytes=self.total_bytes,
                holders=find_holders(self.device, self.tracker),
                hints=list(dict.fromkeys(hints)),
                pieces=[each.nbytes for each in blocks if each.state is BlockState.CACHED],
            )
        )

    def detach_callbacks(self) -> None:
        """Before the interpreter goes: the pool stays, but nothing calls Python any more."""
        self.pool.set_rescue(None)


class PoolInstallation(Installation):
    """An installation of our own pool, with what torch calls."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, _open_pool(device))
        self.entry = AllocatorEntry(self.pool)
        self.entry.set_explain(self.explain)

    def detach_callbacks(self) -> None:
        """Before the interpreter goes: the pool stays, but nothing calls Python any more."""
        super().detach_callbacks()
        self.pool.unwatch()
        self.entry.set_explain(None)


def _open_pool(device: Device) -> Pool:
    settings = read_allocator_settings(device.name.type)
    return Pool(
        device.backend,
        whole_segments=not settings.expandable_segments,
        max_split_bytes=settings.max_split_bytes,
        garbage_collection_threshold=settings.garbage_collection_threshold,
    )


def _label(device: torch.device) -> str:
    return "the CPU device" if device.type == "cpu" else str(device)


def _describe_place(tracker: ModuleTracker) -> str:
    """Return where the running thread is: module, operator of backward, line of the user's code."""
    parts = []
    name = tracker.name(tracker.current())
    if name:
        parts.append(name)
    node = current_node()
    if node is not None:
        parts.append(node.name())
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename.startswith((*_INTERNAL, "<frozen")):
        frame = frame.f_back
    if frame is not None:
        file = Path(frame.f_code.co_filename).name
        parts.append(f"{file}:{frame.f_lineno} ({frame.f_code.co_name})")
    return ", ".join(parts)
