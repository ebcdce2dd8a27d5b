"""The ring that records events of pools and schedulers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from swapkit._native.backend import Handle
from swapkit._native.lib import check, ffi, lib

if TYPE_CHECKING:
    from swapkit._native._lib import CData


_PIECE = 16  # events that are read at once: a recorder reads a few, often


class RingKind(enum.IntEnum):
    """Kinds of recorded events."""

    TAKE = lib.SK_RING_TAKE
    GIVE = lib.SK_RING_GIVE
    RESCUE = lib.SK_RING_RESCUE
    OOM = lib.SK_RING_OOM
    COPY_OUT = lib.SK_RING_COPY_OUT
    COPY_IN = lib.SK_RING_COPY_IN
    MARK = lib.SK_RING_MARK
    OP_BEGIN = lib.SK_RING_OP_BEGIN
    OP_END = lib.SK_RING_OP_END
    # Only in a history:
    FREE = lib.SK_RING_FREE  # the memory of a given block may serve any request
    MAP = lib.SK_RING_MAP
    UNMAP = lib.SK_RING_UNMAP
    COPIED_OUT = lib.SK_RING_COPIED_OUT  # with the times of the copy
    COPIED_IN = lib.SK_RING_COPIED_IN


_KINDS = {int(each): each for each in RingKind}  # `RingKind(number)` takes as long as the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class RingEvent:
    """One recorded event; byte counts are the values after it. `time_ns` is monotonic.

    What an event does not have is 0; `swapkit_pool.h` says which events have what.
    """

    time_ns: int
    kind: RingKind
    nbytes: int
    in_use_bytes: int
    reserved_bytes: int
    tag: int
    requested_bytes: int = 0
    address: int = 0
    stream: int = 0
    group: int = 0  # number of the copied group in its scheduler, from 1
    duration_ns: int = 0  # of a copy, which ended at `time_ns`


class Ring(Handle):
    """A bounded record of a pool's events; the oldest are overwritten."""

    _what = "ring"

    def __init__(self, capacity: int) -> None:
        """Make room for `capacity` events."""
        out = ffi.new("sk_ring **")
        check(lib.sk_ring_create(capacity, out))
        super().__init__(out[0])
        self._capacity = capacity

    def read(self) -> tuple[list[RingEvent], int]:
        """Take the events out; return them, oldest first, and how many were overwritten."""
        capacity = min(self._capacity, _PIECE)
        events = ffi.new("sk_ring_event[]", capacity)
        lost = ffi.new("uint64_t *")
        found, total, count = list[RingEvent](), 0, capacity
        while count == capacity:
            count = lib.sk_ring_read(self.pointer, events, capacity, lost)
            found += [ring_event(events[i]) for i in range(count)]
            total += lost[0]
        return found, total

    def _release(self, pointer: CData) -> None:
        lib.sk_ring_destroy(pointer)


class RingEvents(Sequence[RingEvent]):
    """Events copied out of a ring, oldest first. Each look at one makes a new object.

    Half a million events are 40 MB here, and as objects ten seconds of time and four times that.
    """

    def __init__(self, events: CData, count: int) -> None:
        """Keep the first `count` of an array of `sk_ring_event`."""
        self._events, self._count = events, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> RingEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[RingEvent]: ...

    def __getitem__(self, index: int | slice) -> RingEvent | list[RingEvent]:
        places = range(self._count)[index]
        if isinstance(places, range):
            return [ring_event(self._events[place]) for place in places]
        return ring_event(self._events[places])

    def __repr__(self) -> str:
        return f"<{self._count} events of a ring>"


def ring_event(event: Any) -> RingEvent:
    """Return an `sk_ring_event` as a plain value."""
    return RingEvent(
        time_ns=event.time_ns,
        kind=_KINDS[event.kind],
        nbytes=event.nbytes,
        in_use_bytes=event.in_use_bytes,
        reserved_bytes=event.reserved_bytes,
        tag=event.tag,
        requested_bytes=event.requested_bytes,
        address=event.address,
        stream=event.stream,
        group=event.group,
        duration_ns=event.duration_ns,
    )
