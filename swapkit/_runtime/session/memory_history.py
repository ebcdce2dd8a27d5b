"""The events of a session's pool and of its copies, recorded on request."""

from __future__ import annotations

import weakref

from swapkit._native.layout import TAG_BACKWARD
from swapkit._native.pool import Pool, Ring, RingEvent, RingKind
from swapkit._native.sched import Scheduler
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.saved.device import DevicePool
from swapkit._runtime.session.life import SessionLife
from swapkit.errors import InvalidArgument, SessionError
from swapkit.ir.pool_histories import PoolEvent, PoolEventKind, PoolHistory
from swapkit.units import show

MOST_ENTRIES = 500_000  # 80 bytes each, taken from the host as they fill up
_LARGEST = 1 << 32

_KINDS = {
    RingKind.COPIED_OUT: PoolEventKind.COPY_OUT,
    RingKind.COPIED_IN: PoolEventKind.COPY_IN,
    RingKind.RESCUE: PoolEventKind.RESCUE,
    RingKind.OOM: PoolEventKind.OUT_OF_MEMORY,
}


class MemoryRecording:
    """A record of a session's pool and copies, from now until `stop`, or until it is lost."""

    def __init__(self, life: SessionLife, max_entries: int) -> None:
        """Begin to record.

        Args:
            life: the session.
            max_entries: of these, the latest are kept: see `check_entries`.

        Raises:
            SessionError: the pool is not ours, or another session records it.
        """
        pool = require_pool(life.installation)
        ring = Ring(max_entries)
        try:
            pool.set_history(ring)
        except InvalidArgument:
            raise SessionError(
                "another session records the history of this device's pool: end it first, or "
                "export the trace of that session"
            ) from None
        life.swapper.scheduler.set_history(ring)
        # The collector may call it, on any thread: it takes native locks only.
        self._stop = weakref.finalize(self, _detach, pool, life.swapper.scheduler)
        self._stop.atexit = False

    def stop(self) -> None:
        """Stop recording; the events are lost. Safe to call twice."""
        self._stop()


def check_entries(max_entries: object) -> None:
    """Check how many events are to be kept.

    Raises:
        InvalidArgument: it is not a number of at least 1.
    """
    if type(max_entries) is not int or not 1 <= max_entries <= _LARGEST:
        raise InvalidArgument(
            f"max_entries={show(max_entries)}: expected a whole number from 1 to {_LARGEST}"
        )


def _detach(pool: Pool, scheduler: Scheduler) -> None:
    scheduler.set_history(None)
    pool.set_history(None)


def require_pool(installation: Installation) -> Pool:
    """Return the pool of an installation.

    Raises:
        SessionError: torch's own allocator serves the device.
    """
    pool: DevicePool = installation.pool
    if not isinstance(pool, Pool):
        raise SessionError(
            f"{installation.device.name} keeps torch's own allocator, which records its history "
            "itself: use torch.cuda.memory._record_memory_history() and _dump_snapshot()"
        )
    return pool


class PoolLook:
    """The recorded events of a pool. Any thread.

    Quick to take when a session ends; the history, which takes longer, is made for those who ask.
    """

    def __init__(self, installation: Installation) -> None:
        """Look at the pool.

        Raises:
            SessionError: the pool is not ours.
        """
        self._view = require_pool(installation).view()
        self._name = installation.tracker.name

    def history(self) -> PoolHistory:
        """Return the events."""
        return PoolHistory(
            events=tuple(map(self._event, self._view.events)), lost_events=self._view.lost_events
        )

    def _event(self, event: RingEvent) -> PoolEvent:
        return PoolEvent(
            kind=_KINDS.get(event.kind, PoolEventKind.CHANGE),
            time_ns=event.time_ns,
            nbytes=event.nbytes,
            address=event.address,
            label=self._label(event.tag),
            duration_ns=event.duration_ns,
            group=event.group,
            in_use_bytes=event.in_use_bytes,
            reserved_bytes=event.reserved_bytes,
        )

    def _label(self, tag: int) -> str:
        module = self._name(tag)
        return f"{module} (backward)" if module and tag & TAG_BACKWARD else module
