"""The pool that serves torch on a device, and the sessions that use it.

Torch has one allocator per device, so there is one pool per device and process. The pool stays
until the process ends, since tensors live in it; uninstalling only redirects new tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Generic, Protocol

import torch
from typing_extensions import TypeVar

from swapkit._native.entry import AllocatorEntry
from swapkit._native.lib import CALLBACKS, failure_text
from swapkit._native.pool import BlockState, Pool
from swapkit._runtime.allocators.memory_holders import advise_here, find_holders
from swapkit._runtime.allocators.pool_layout import PoolLayout
from swapkit._runtime.model.ranks import describe_rank, share_of_node
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.undo import raise_first
from swapkit._runtime.saved.device import CPU, Device, DevicePool
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.accelerators import NPU
from swapkit._runtime.torch_compat.internals import current_node
from swapkit._runtime.torch_compat.isolation import hide, untraced
from swapkit.config.allocator_settings import (
    AllocatorSettings,
    read_allocator_settings,
    report_settings,
)
from swapkit.errors import OverBudget, SessionError
from swapkit.reporting.text import AllocationFailure, format_failure, format_hints
from swapkit.units import format_bytes, format_limit, round_up

# Folders with code that is not the user's.
_INTERNAL = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")

# The compiler would trace each that the core calls between two graphs of a compiled function.
for _callback in CALLBACKS:
    untraced(_callback)


class ActiveSession(Protocol):
    """A session, as the installation sees it."""

    limit_bytes: int
    thread: threading.Thread  # that entered it

    @property
    def is_settled(self) -> bool:
        """Whether the next steps are expected to be like the last one."""

    def rescue(self, needed_bytes: int) -> int:
        """Free device memory; return the freed bytes, 0 for none."""

    def hints(self, needed_bytes: int) -> list[str]:
        """Return hints for the user when memory runs out and `needed_bytes` are needed."""

    def facts(self) -> list[str]:
        """Return sentences about what the session could not free."""

    def note_peak(self) -> None:
        """Take the pool's peak since the last call into account."""

    def add_peak(self, peak_bytes: int) -> None:
        """Note that `peak_bytes` were reserved while the session was active."""

    def close(self) -> list[BaseException]:
        """End the session, from any thread; return the exceptions raised meanwhile."""


_Pool = TypeVar("_Pool", bound="DevicePool", default=Pool)


class Installation(Generic[_Pool]):
    """A device's pool and the sessions that use it."""

    layout: PoolLayout | None = None  # None: the pool is not ours
    tells_failures = False  # whether a request for memory that fails calls `explain`

    def __init__(self, device: Device, pool: _Pool) -> None:
        self.device = device
        self.pool = pool
        self.runtime = get_runtime()
        self.tracker = self.runtime.tracker
        self.lock = self.runtime.lock
        self.limit_bytes = 0  # set by the user for the whole process; 0: none
        self.usual_limit_bytes = 0  # from the environment, used if the user sets none; 0: none
        self.sessions: list[ActiveSession] = []  # innermost last
        self._most_bytes = 0  # up to which the budget grows; 0: it does not. See `growing`
        self.active = False  # whether new tensors come from the pool
        # Called with the text of each request for memory that fails, on its thread; see `explain`.
        self.failures: list[Callable[[str], None]] = []
        self.runtime.attach_pool(device, pool)
        atexit.register(self.detach_callbacks)

    @property
    def total_bytes(self) -> int:
        """Total memory of the device in bytes."""
        return self.device.backend.memory_info().total_bytes

    def shared_bytes(self) -> int:
        """Return what shares refer to: the device's memory, or this rank's part of the machine's.

        A rank has an accelerator for itself. The first call may wait: see `count_node_ranks`.
        """
        total_bytes = self.total_bytes
        return share_of_node(total_bytes) if self.device.name == CPU else total_bytes

    @property
    def separates_lives(self) -> bool:
        """Whether the pool keeps memory that lives unequally long apart."""
        return self.layout is not None and self.layout.separates

    @property
    def is_moving(self) -> bool:
        """Whether memory moves to or from planned addresses in the current step."""
        return self.layout is not None and self.layout.is_moving

    def set_limit(self, limit_bytes: int) -> None:
        """Set a limit for the whole process, in addition to those of sessions; 0: none.

        Raises:
            OverBudget: more memory is in use and cannot be freed; the limit is unchanged.
        """
        with self.lock:
            self._apply(limit_bytes, self.sessions)
            (self.tracker.start if limit_bytes else self.tracker.stop)(self)
            self.limit_bytes = limit_bytes

    def require_no_session(self) -> None:
        """Check that no session is active.

        Raises:
            SessionError: a session is active.
        """
        if self.sessions:
            raise SessionError(
                "swapkit cannot be uninstalled inside `with swapkit.budget(...)`: close the "
                "sessions in swapkit.sessions() first, or call swapkit.uninstall(force=True)"
            )

    def end_sessions(self) -> None:
        """End every session, innermost first; raise their errors after the last one."""
        raise_first([error for session in reversed(self.sessions) for error in session.close()])

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Raise the budget wherever a request would fail: `device.budget_bytes` says how far."""
        self._most_bytes = self.total_bytes
        try:
            yield
        finally:
            self._most_bytes = 0

    def _grow(self, needed_bytes: int) -> int:
        """Raise the budget by what a request lacks; return that, 0 if it may not grow."""
        granule_bytes = self.device.backend.granule_bytes
        budget_bytes = self.device.budget_bytes + round_up(needed_bytes, granule_bytes)
        return needed_bytes if budget_bytes <= self._most_bytes and self._fits(budget_bytes) else 0

    def drop_limit(self) -> None:
        """Remove the process's own limit and return cached memory to the device."""
        self.set_limit(0)
        self.pool.trim()

    def enter(self, session: ActiveSession) -> None:
        """Apply a session's limit; the lowest of all limits holds.

        Raises:
            OverBudget: more memory is in use and cannot be freed; the session is not entered.
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

    def nested_with(self, session: ActiveSession) -> list[ActiveSession]:
        """Return the sessions that the same thread entered, innermost last. Any thread."""
        return [each for each in self.sessions if each.thread is session.thread]

    def _apply(self, limit_bytes: int, sessions: list[ActiveSession]) -> None:
        limits = [session.limit_bytes for session in sessions]
        limits += [limit_bytes] if limit_bytes else []
        budget_bytes = min(limits, default=0)
        while not self._fits(budget_bytes):
            reserved_bytes = self.pool.stats()["reserved_bytes.all.current"]
            if self._rescue(reserved_bytes - budget_bytes) == 0:
                raise OverBudget(self._describe_excess(budget_bytes, sessions[-1:]))

    def _fits(self, budget_bytes: int) -> bool:
        """Set the pool's budget; return False if too much memory is in use."""
        try:
            self.pool.set_budget(budget_bytes)
        except OverBudget:
            return False
        self.device.budget_bytes = budget_bytes
        return True

    def _describe_excess(self, budget_bytes: int, sessions: list[ActiveSession]) -> str:
        holders = ", ".join(
            f"{format_bytes(holder.nbytes)} {holder.name}"
            for holder in find_holders(self.device, self.tracker)[:3]
        )
        in_use_bytes = self.pool.in_use_bytes()
        rank = describe_rank()
        text = (
            f"{rank}{': ' if rank else ''}a budget of {format_bytes(budget_bytes)} is too small: "
            f"{format_bytes(in_use_bytes)} are already in use ({holders}). Pass a larger budget, "
            "or free tensors first."
        )
        hints = [each for session in sessions for each in session.hints(in_use_bytes)]
        if self.sessions:
            hints.append(
                "end the session that runs: weights leave only in the one that began first"
            )
        return "\n".join([text, *format_hints(hints)])

    @untraced
    def _rescue(self, needed_bytes: int) -> int:
        """Let the sessions free memory, innermost first; return the freed bytes.

        Runs on the allocating thread, which may be any, in the middle of an operator or of
        backward. It holds no locks except those that the thread held before.
        """
        for session in reversed(self.sessions):
            freed = session.rescue(needed_bytes)
            if freed > 0:
                return freed
        with self.lock:
            others = self.runtime.swappers(self.device)
        freed = next(filter(None, (each.rescue_bytes(needed_bytes) for each in others)), 0)
        freed = freed or self._collect_garbage() or self._grow(needed_bytes)
        if freed or thread_state.tries_memory:
            return freed
        return next(filter(None, (each.adopt_weights(needed_bytes) for each in others)), 0)

    def _collect_garbage(self) -> int:
        """Free memory held by reference cycles as a last resort; return the freed bytes.

        This runs the user's finalizers in the middle of an operator, so they are hidden from modes.
        Do nothing while this thread holds the runtime's lock: a finalizer may wait for another
        thread that waits for the lock.
        """
        if self.lock.is_owned():
            return 0
        before_bytes = self.pool.in_use_bytes()
        hide(gc.collect)
        return max(0, before_bytes - self.pool.in_use_bytes())

    def explain(self, nbytes: int) -> str:
        """Return the error text for a failed allocation of `nbytes`.

        Called like `_rescue`. Other threads may be running torch code: see `memory_holders.py`.
        """
        cause = failure_text()  # before other calls of this thread fail
        stats = self.pool.stats()
        in_use_bytes = stats["allocated_bytes.all.current"]
        hints = advise_here(stats, nbytes, separates=self.separates_lives)
        facts: list[str] = []
        for session in reversed(self.sessions):
            hints += session.hints(in_use_bytes + nbytes)
            facts += session.facts()
        if not self.sessions:
            # Whole pieces of memory are reserved: less than the present limit is never enough.
            needed_bytes = max(in_use_bytes + nbytes, stats["budget_bytes"] + 1)
            hints += [
                "train inside `with swapkit.budget(limit, model, optimizer):`, which moves saved "
                "tensors to the host instead of failing",
                f"a limit of at least {format_limit(needed_bytes)}, or a smaller batch or sequence",
                "swapkit estimate: the smallest budget of a script, and its time by budget",
            ]
        blocks = self.pool.blocks()
        text = format_failure(
            AllocationFailure(
                asked=nbytes,
                where=_describe_place(self.tracker),
                in_use=in_use_bytes,
                active=stats["active_bytes.all.current"],
                reserved=stats["reserved_bytes.all.current"],
                budget=stats["budget_bytes"],
                device=_label(self.device.name),
                rank=describe_rank(),
                device_bytes=self.total_bytes,
                holders=find_holders(self.device, self.tracker),
                facts=list(dict.fromkeys(facts)),
                hints=list(dict.fromkeys(hints)),
                pieces=[each.nbytes for each in blocks if each.state is BlockState.CACHED],
                cause=cause,
            )
        )
        if not thread_state.tries_memory:
            for tell in reversed(tuple(self.failures)):  # the innermost session first
                tell(text)
        return text

    def detach_callbacks(self) -> None:
        """Stop all calls into Python before the interpreter exits; the pool stays."""
        self.pool.set_rescue(None)


class PoolInstallation(Installation):
    """An installation of our own pool, with the entry that torch calls."""

    tells_failures = True

    def __init__(self, device: Device) -> None:
        settings = read_allocator_settings(device.name.type)
        super().__init__(device, _open_pool(device, settings))
        report_settings(settings)
        if self.pool.stats()["expandable_segments"]:
            self.layout = PoolLayout(self.pool, self.runtime.shim.backward_address)
        if settings.memory_fraction is not None:
            self.usual_limit_bytes = max(1, int(settings.memory_fraction * self.total_bytes))
        if device.name.type == NPU.type:
            self.pool.set_settle(self.runtime.shim.npu_settle_address, device.index)
        self.entry = AllocatorEntry(self.pool)
        self.entry.set_explain(self.explain)

    def detach_callbacks(self) -> None:
        """Stop all calls into Python before the interpreter exits; the pool stays."""
        super().detach_callbacks()
        self.pool.unwatch()
        self.entry.set_explain(None)


def _open_pool(device: Device, settings: AllocatorSettings) -> Pool:
    return Pool(
        device.backend,
        whole_segments=not settings.expandable_segments,
        max_split_bytes=settings.max_split_bytes,
        garbage_collection_threshold=settings.garbage_collection_threshold,
        roundup_divisions=settings.roundup_divisions,
    )


def _label(device: torch.device) -> str:
    return "the CPU device" if device.type == "cpu" else str(device)


def _describe_place(tracker: ModuleTracker) -> str:
    """Return the running module, autograd node and line of user code on this thread."""
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
