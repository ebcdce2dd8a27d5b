"""What happened to the memory of a pool, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PoolEventKind(enum.Enum):
    """The kind of an event of a pool, or of a copy from or to its memory."""

    CHANGE = "change"  # of the bytes in use or reserved
    COPY_OUT = "copy out"  # from the device; the event is the end of the copy
    COPY_IN = "copy in"
    RESCUE = "rescue"  # memory was freed in the middle of an allocation
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """One event. What it does not have is 0 or empty; amounts are bytes, times nanoseconds."""

    kind: PoolEventKind
    time_ns: int  # monotonic
    nbytes: int = 0
    address: int = 0
    label: str = ""  # where the copied tensor was saved
    duration_ns: int = 0  # of a copy, which ended at `time_ns`
    group: int = 0  # of a copy: the same number for the same storage
    in_use_bytes: int = 0  # of the pool, after it
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHistory:
    """The events of a pool up to one moment, in the order in which they happened to it."""

    events: tuple[PoolEvent, ...]
    lost_events: int = 0  # older ones, of which there is no record any more
