"""How allocators round requests, and the segments that torch's asks the device for.

Source:
    c10/core/AllocatorConfig.h, the constants and `roundup_power2_divisions`;
    c10/cuda/CUDACachingAllocator.cpp, `round_size`, `get_allocation_size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit.units import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request that goes to the pool of small blocks
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size(), which was kLargeBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment of the request's own size
LARGE_ROUNDING_BYTES = 2 * MIB  # kRoundLarge
ROUNDING_BYTES = 512  # of swapkit's pool: SK_ROUND_BYTES in pool.h
_FIRST_DIVISION = 20  # log2 of the first interval of divisions, 1 MiB
_DIVISIONS = 16


def round_request(nbytes: int, divisions: Sequence[int] = ()) -> int:
    """Return the size of the block that serves a request; `round_size`.

    Args:
        nbytes: requested, at least 1.
        divisions: number k is for requests from 1 << k MiB, the first also for smaller and the last
            of 16 also for larger ones: they are rounded up to the next of so many equal parts of
            their power of two. 0, 1 or missing: to 512 bytes.

    Example:
        >>> round_request(1), round_request(513), round_request(9 * MIB, (4,) * 16) // MIB
        (512, 1024, 10)
    """
    interval = min(max(nbytes.bit_length() - 1 - _FIRST_DIVISION, 0), _DIVISIONS - 1)
    parts = divisions[interval] if interval < len(divisions) else 0
    if parts > 1 and nbytes > MIN_BLOCK_BYTES * parts:
        floor = 1 << (nbytes.bit_length() - 1)
        return nbytes if nbytes == floor else round_up(nbytes, floor // parts)
    return max(MIN_BLOCK_BYTES, round_up(nbytes, MIN_BLOCK_BYTES))


def segment_bytes(nbytes: int) -> int:
    """Return the size of the segment made for a block of `nbytes`; `get_allocation_size`."""
    if nbytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if nbytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(nbytes, LARGE_ROUNDING_BYTES)
