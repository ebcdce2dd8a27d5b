"""The memory of each operator of a recorded step, from the events of the pool."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from swapkit._native.pool import Pool, Ring, RingKind
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from swapkit._native.pool import RingEvent
    from swapkit._runtime.recording.tables.blocks import Blocks
    from swapkit._runtime.saved.device import DevicePool

_RING_EVENTS = 1 << 16
_OURS = 1  # in the `nbytes` field: identifies our own operator marks
NO_WORKSPACE = -1


class Workspaces:
    """The memory that each operator takes from the pool and returns before it ends.

    Read from the pool's event ring; unknown if the pool already has a ring with another reader.
    The blocks that are taken and given go to a table of their own.
    """

    def __init__(self, pool: DevicePool | None, blocks: Blocks) -> None:
        self._pool = pool if isinstance(pool, Pool) else None
        self.blocks = blocks
        self._ring: Ring | None = None
        self.in_use_bytes: int | None = None  # when the ring was attached
        self.peaks: list[int] = []  # by call of `end`: the most bytes in use since `begin`
        self.dropped: list[int] = []  # by call of `end`: bytes of older blocks given back meanwhile
        self._workspaces: list[int] = []  # by call of `end`: bytes
        self._most = self._before = 0
        self._rescued = self._dropped = 0  # since the operator began
        self._begun = 0
        self._is_open = False
        self._ended = 0  # operators that have ended, by the events read so far
        self._held: list[RingEvent] = []  # by other threads, after the open operator had ended
        self._seen = 0  # operators that have begun, likewise

    def start(self) -> None:
        """Attach a ring to the pool, unless another reader has attached one."""
        if self._pool is None:
            return
        ring = Ring(_RING_EVENTS)
        with contextlib.suppress(InvalidArgument):
            self._pool.attach(ring)
            self._ring = ring
            self.blocks.is_whole = True

    def stop(self) -> None:
        """Detach the ring; calls after the first do nothing."""
        if self._ring is not None and self._pool is not None:
            self._pool.detach()
            self.close()
            self.read()
            self._ring = None

    @property
    def is_on(self) -> bool:
        """Whether workspaces are being recorded."""
        return self._ring is not None

    def begin(self) -> None:
        """Note that an operator begins; `close` follows once it is noted."""
        assert self._pool is not None
        self._begun += 1
        self._is_open = True
        self._pool.note(RingKind.OP_BEGIN, _OURS)

    def end(self) -> int:
        """Note that the operator has ended; return its number for `bytes_of`."""
        assert self._pool is not None
        self._pool.note(RingKind.OP_END, _OURS)
        return self._begun - 1

    def close(self) -> None:
        """Note that the operator that began last is noted, if it is: what happens now is later."""
        self._is_open = False

    def bytes_of(self, number: int) -> int:
        """Return the workspace of an operator in bytes; 0: unknown."""
        is_known = self.blocks.is_whole and 0 <= number < len(self._workspaces)
        return self._workspaces[number] if is_known else 0

    def read(self) -> None:
        """Read the pool's events since the last call. The recorder's lock is held."""
        if self._ring is None:
            return
        events, lost = self._ring.read()
        if lost:
            self.blocks.is_whole = False  # numbers no longer match
        events = self._held + events
        self._held = []
        for at, event in enumerate(events):
            if self._is_open and self._ended == self._begun:
                self._held = events[at:]
                break
            self._note(event)

    def _note(self, event: RingEvent) -> None:
        if self.in_use_bytes is None:
            self.in_use_bytes = _bytes_before(event)
        level = event.in_use_bytes + self._rescued
        self._most = max(self._most, level)
        if event.kind in _OF_BLOCKS:
            self._note_block(event)
        elif event.kind is RingKind.RESCUE:  # inside an operator: not memory of its own
            self._rescued += min(event.nbytes, max(0, self._most - level))
        elif event.nbytes != _OURS:
            return
        elif event.kind is RingKind.OP_BEGIN:
            self._most = self._before = event.in_use_bytes
            self._rescued = self._dropped = 0
            self._seen += 1
        elif event.kind is RingKind.OP_END:
            self.peaks.append(self._most)
            self.dropped.append(self._dropped)
            self._workspaces.append(self._most - max(self._before, level))
            self._ended += 1

    def _note_block(self, event: RingEvent) -> None:
        call = self._seen if self._seen > self._ended else 0
        if event.kind is RingKind.TAKE:
            self.blocks.take(event.address, event.nbytes, event.requested_bytes, call)
        elif event.kind is RingKind.GIVE:
            if self.blocks.give(event.address, event.nbytes, call):
                self._dropped += event.nbytes
        else:
            self.blocks.come_back(event.nbytes)


_OF_BLOCKS = {RingKind.TAKE, RingKind.GIVE, RingKind.COPY_IN}


def _bytes_before(event: RingEvent) -> int:
    """Return the bytes in use before an event."""
    change = {RingKind.TAKE: event.nbytes, RingKind.GIVE: -event.nbytes}
    return event.in_use_bytes - change.get(event.kind, 0)
