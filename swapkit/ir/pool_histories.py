"""The memory of a pool and what happened to it, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PoolEventKind(enum.Enum):
    """The kind of an event of a pool, or of a copy from or to its memory."""

    TAKE = "take"
    GIVE = "give"  # the owner of a block gives it back
    FREE = "free"  # its memory may serve any request: after the work of other streams
    MAP = "map"  # the device's memory lies at these addresses from now on
    UNMAP = "unmap"  # and no longer at these
    COPY_OUT = "copy out"  # from the device; the event is the end of the copy
    COPY_IN = "copy in"
    RESCUE = "rescue"  # memory was freed in the middle of an allocation
    OUT_OF_MEMORY = "out of memory"
    STEP = "step"  # a training step ends


class BlockUse(enum.Enum):
    """The use of a block."""

    IN_USE = "in use"
    AWAITED = "awaited"  # given back, but other streams still work on it
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """One event. What it does not have is 0 or empty; amounts are bytes, times nanoseconds."""

    kind: PoolEventKind
    time_ns: int  # monotonic
    nbytes: int = 0
    requested_bytes: int = 0  # of a block, not rounded
    address: int = 0
    stream: int = 0  # of a block
    label: str = ""  # where the block was taken, or the copied tensor saved
    duration_ns: int = 0  # of a copy, which ended at `time_ns`
    group: int = 0  # of a copy: the same number for the same storage
    in_use_bytes: int = 0  # of the pool, after it
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBlock:
    """A part of a segment."""

    address: int
    nbytes: int
    use: BlockUse
    requested_bytes: int = 0
    stream: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSegment:
    """A range of addresses with memory, tiled by blocks in the order of their addresses."""

    blocks: tuple[PoolBlock, ...]
    is_small: bool = False  # for blocks of up to 1 MiB

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.blocks[0].address

    @property
    def nbytes(self) -> int:
        """The bytes of all its blocks."""
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHistory:
    """A pool at one moment, and the events up to then if they were recorded.

    `wall_ns`: added to an event's time, it gives the time since 1970.
    """

    segments: tuple[PoolSegment, ...]
    events: tuple[PoolEvent, ...] = ()  # in the order in which they happened to the pool
    lost_events: int = 0  # older ones, of which there is no record any more
    moves_granules: bool = True  # memory is mapped and unmapped; False: segments come and go whole
    device_index: int = 0
    wall_ns: int = 0
