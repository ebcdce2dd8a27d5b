"""The blocks, the segments and the history of a pool, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swapkit._native.lib import ffi, lib
from swapkit._native.rings import RingEvents

if TYPE_CHECKING:
    from swapkit._native._lib import CData

_SPARE = 64  # room for what is added between two looks


class BlockState(enum.IntEnum):
    """State of a block; PENDING waits for another stream."""

    IN_USE = lib.SK_BLOCK_IN_USE
    PENDING = lib.SK_BLOCK_PENDING
    CACHED = lib.SK_BLOCK_CACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """A part of a segment, in use or free."""

    address: int
    nbytes: int
    requested_bytes: int
    stream: int  # address of the stream whose order its use follows
    tag: int
    state: BlockState
    age: int = 0  # steps that have ended since it was taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """A range of addresses, of which the device holds `committed_bytes`."""

    address: int
    nbytes: int
    committed_bytes: int
    is_small: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolView:
    """A pool and its history at one moment. `lost_events`: how many were overwritten."""

    blocks: tuple[BlockInfo, ...]  # of one segment after the other, by address
    segments: tuple[SegmentInfo, ...]
    events: RingEvents  # oldest first; none if no history is recorded
    lost_events: int


def block_info(block: Any) -> BlockInfo:
    """Return an `sk_block_info` as a plain value."""
    return BlockInfo(
        address=block.address,
        nbytes=block.nbytes,
        requested_bytes=block.requested_bytes,
        stream=block.stream,
        tag=block.tag,
        state=BlockState(block.state),
        age=block.age,
    )


def segment_info(segment: Any) -> SegmentInfo:
    """Return an `sk_segment_info` as a plain value."""
    return SegmentInfo(
        address=segment.address,
        nbytes=segment.nbytes,
        committed_bytes=segment.committed_bytes,
        is_small=segment.is_small,
    )


def read_view(pool: CData) -> PoolView:
    """Return the blocks, the segments and the history of an `sk_pool` at one moment."""
    view = ffi.new("sk_pool_view *")
    events = ffi.NULL
    while True:
        lib.sk_pool_view_get(pool, view)
        counts = view.event_count, view.block_count, view.segment_count
        room = view.most_events, view.most_blocks, view.most_segments
        if all(count <= most for count, most in zip(counts, room, strict=True)):
            break
        # The view has addresses only: the arrays live as long as these names.
        events, view.most_events = _make_room("sk_ring_event[]", counts[0])
        blocks, view.most_blocks = _make_room("sk_block_info[]", counts[1])
        segments, view.most_segments = _make_room("sk_segment_info[]", counts[2])
        view.events, view.blocks, view.segments = events, blocks, segments
    return PoolView(
        blocks=tuple([block_info(view.blocks[i]) for i in range(counts[1])]),
        segments=tuple([segment_info(view.segments[i]) for i in range(counts[2])]),
        events=RingEvents(events, counts[0]),
        lost_events=view.lost_events,
    )


def _make_room(kind: str, count: int) -> tuple[CData, int]:
    most = count + count // 8 + _SPARE
    return ffi.new(kind, most), most
