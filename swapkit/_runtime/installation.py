"""The pool that stands below torch on this process's device.

There is one pool a device and process: torch has one allocator. It stays for the life of the
process, since tensors live in it; uninstalling only lets new tensors go elsewhere.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from swapkit._native.entry import Entry
from swapkit._native.pool import Pool
from swapkit._runtime.guards import untraced
from swapkit._runtime.holders import find_holders
from swapkit._runtime.runtime import get_runtime
from swapkit.errors import InvalidArgument, OverBudget, SessionError, Unsupported
from swapkit.reporting.text import Failure, format_failure
from swapkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from types import FrameType

    from swapkit._runtime.tracking import ModuleTracker

# Files that are not the user's.
_INTERNAL = (f"{Path(__file__).parent.parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")


class ActiveSession(Protocol):
    """A session, as the installation sees it."""

    limit_bytes: int

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device; return how many, 0 for none."""

    def hints(self) -> list[str]:
        """Return what a user could do when memory is out in this session."""

    def note_peak(self) -> None:
        """Count the pool's peak since it was last asked."""

    def add_peak(self, peak_bytes: int) -> None:
        """Note that so many bytes were reserved while the session was active."""


class Installation:
    """The pool, what torch calls, and the sessions that act on it."""

    def __init__(self) -> None:
        self.runtime = get_runtime()
        self.backend = self.runtime.backend
        self.tracker = self.runtime.tracker
        self.lock = self.runtime.lock
        self.pool = Pool(self.backend)
        self.runtime.attach_pool(self.pool)
        self.entry = Entry(self.pool)
        self.active = False
        self.limit_bytes = 0  # set by the user for the whole process; 0: none
        self.sessions: list[ActiveSession] = []  # innermost last
        self.entry.set_explain(self._explain)
        atexit.register(self._detach_callbacks)

    def start(self, limit_bytes: int) -> None:
        """Put the pool below torch, with a limit of its own if that is not 0."""
        with self.lock:
            self._apply(limit_bytes, self.sessions)
            if bool(limit_bytes) != bool(self.limit_bytes):
                (self.tracker.start if limit_bytes else self.tracker.stop)()
            self.limit_bytes = limit_bytes
        self.runtime.shim.install(self.entry.addresses())
        self.active = True

    def stop(self) -> None:
        """Let new tensors go to torch's own allocator again.

        Raises:
            SessionError: a session is active.
        """
        if self.sessions:
            raise SessionError("swapkit cannot be uninstalled inside `with swapkit.budget(...)`")
        self.runtime.shim.uninstall()
        self.active = False
        if self.limit_bytes:
            self.tracker.stop()
        self.limit_bytes = 0
        self._fits(0)
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
        self.runtime.budget_bytes = budget_bytes
        return True

    def _describe_excess(self, budget_bytes: int) -> str:
        holders = ", ".join(
            f"{format_bytes(holder.nbytes)} {holder.name}"
            for holder in find_holders(self.pool, self.tracker)[:3]
        )
        in_use = format_bytes(self.pool.in_use_bytes())
        return (
            f"a budget of {format_bytes(budget_bytes)} is not possible: {in_use} are in use "
            f"already ({holders}). Give a larger budget, or free tensors first."
        )

    @untraced
    def _rescue(self, needed_bytes: int) -> int:
        """Ask the sessions, innermost first."""
        for session in reversed(self.sessions):
            freed = session.rescue(needed_bytes)
            if freed > 0:
                return freed
        with self.lock:
            others = list(self.runtime.swappers)
        return next(filter(None, (each.rescue_bytes(needed_bytes) for each in others)), 0)

    def _explain(self, nbytes: int) -> str:
        stats = self.pool.stats()
        hints = [hint for session in reversed(self.sessions) for hint in session.hints()]
        if not self.sessions:
            hints = [
                "train inside `with swapkit.budget(limit, model, optimizer):`, which moves saved "
                "tensors to the host instead of failing",
                "a smaller batch or sequence, or a larger limit",
            ]
        return format_failure(
            Failure(
                asked=nbytes,
                where=_describe_place(self.tracker),
                in_use=stats["allocated_bytes.all.current"],
                reserved=stats["reserved_bytes.all.current"],
                budget=stats["budget_bytes"],
                device=self.backend.memory_info().total_bytes,
                holders=find_holders(self.pool, self.tracker),
                hints=list(dict.fromkeys(hints)),
            )
        )

    def _detach_callbacks(self) -> None:
        """Before the interpreter goes: the pool stays, but nothing calls Python any more."""
        self.pool.set_rescue(None)
        self.entry.set_explain(None)


def _describe_place(tracker: ModuleTracker) -> str:
    """Return where the running thread is: module, operator of backward, line of the user's code."""
    parts = []
    name = tracker.name(tracker.current())
    if name:
        parts.append(name)
    node = torch._C._current_autograd_node()  # noqa: SLF001 - torch has no public way to ask
    if node is not None:
        parts.append(node.name())
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename.startswith((*_INTERNAL, "<frozen")):
        frame = frame.f_back
    if frame is not None:
        file = Path(frame.f_code.co_filename).name
        parts.append(f"{file}:{frame.f_lineno} ({frame.f_code.co_name})")
    return ", ".join(parts)


_installation: Installation | None = None
_lock = threading.Lock()


def install(limit: int | float | str | None = None, *, device: str | torch.device = "cpu") -> None:
    """Put swapkit's pool below every tensor made on the device from now on.

    Calling it again is fine and only changes the limit. Tensors made before stay where they are:
    they are outside the budget, and a session's summary names them. Only CPU tensors of torch's
    own allocator are meant; shared memory, files and numpy arrays keep their own memory.

    Args:
        limit: most bytes the pool may reserve in this process, whatever sessions ask for: bytes,
            `"10GiB"`, `"80%"` or a fraction of the device's memory. None: no limit. An allocation
            that would pass it raises `torch.OutOfMemoryError`.
        device: `"cpu"` is what this version serves.

    Raises:
        InvalidArgument: the limit is not understood.
        OverBudget: more than the limit is in use already.
        NativeBuildError: the allocator shim could not be compiled; see the message.
        Unsupported: another device.

    Example:
        >>> import swapkit, torch
        >>> swapkit.install()
        >>> x = torch.zeros(1024)
        >>> swapkit.memory_stats()["allocated_bytes.all.current"] >= 4096
        True
    """
    global _installation  # noqa: PLW0603 - torch has one allocator a device and process
    check_device(device)
    with _lock:
        # Kept even if the limit is refused below: its hooks are the process's for good.
        _installation = _installation or Installation()
        total_bytes = _installation.backend.memory_info().total_bytes
        limit_bytes = (
            0 if limit is None else parse_bytes(limit, whole_bytes=total_bytes, name="limit")
        )
        _installation.start(limit_bytes)


def uninstall() -> None:
    """Let tensors made from now on go to torch's own allocator again.

    Tensors in the pool stay valid and are freed as usual. Without an installation nothing happens.

    Raises:
        SessionError: a session is active.
    """
    with _lock:
        if _installation is not None and _installation.active:
            _installation.stop()


def require_installation() -> Installation:
    """Return the active installation.

    Raises:
        SessionError: swapkit is not installed.
    """
    if _installation is None or not _installation.active:
        raise SessionError("swapkit's pool is not installed: call swapkit.install() first")
    return _installation


def ensure_installation() -> Installation:
    """Return the active installation, installing it if need be."""
    if _installation is None or not _installation.active:
        install()
    return require_installation()


def installed_pool() -> Pool:
    """Return the pool below torch.

    Raises:
        SessionError: swapkit is not installed.
    """
    return require_installation().pool


def check_device(device: str | torch.device) -> None:
    """Refuse a device that this version does not serve."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={device!r} is not understood: {error}") from None
    if kind != "cpu":
        raise Unsupported(f"device={str(device)!r}: this version of swapkit serves only 'cpu'")
