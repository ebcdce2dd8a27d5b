"""torch's allocator as it is by default: one call of `cudaMalloc` for each segment."""

from __future__ import annotations

from bisect import insort

from benchmarks.replay.caching import (
    LARGE_SEGMENT_BYTES,
    MIB,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachedBlock,
    CachingAllocator,
    Shelf,
)
from swapkit.units import round_up

MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment of the request's own size
LARGE_ROUNDING_BYTES = 2 * MIB  # kRoundLarge


class NativeAllocator(CachingAllocator):
    """The model without `expandable_segments`."""

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        super().__init__(budget_bytes=budget_bytes)
        self._addresses = DeviceAddresses()

    def _should_split(self, block: CachedBlock, size: int) -> bool:
        rest = block.nbytes - size
        return rest >= MIN_BLOCK_BYTES if block.shelf.is_small else rest > SMALL_BYTES

    def _grow(self, shelf: Shelf, size: int) -> CachedBlock | None:
        nbytes = segment_bytes(size)
        if not self._fits(nbytes):
            return None
        self.reserved_bytes += nbytes
        return CachedBlock(self._addresses.take(nbytes), nbytes, shelf)

    def _release(self, shelf: Shelf) -> None:
        for block in [each for each in shelf.blocks.values() if each.is_whole]:
            shelf.remove(block)
            self.reserved_bytes -= block.nbytes
            self._addresses.give(block.address, block.nbytes)


def segment_bytes(nbytes: int) -> int:
    """Return the size of the segment made for a block of `nbytes`; `get_allocation_size`."""
    if nbytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if nbytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(nbytes, LARGE_ROUNDING_BYTES)


class DeviceAddresses:
    """Addresses of segments. `cudaMalloc` documents no order: here each gets the lowest free."""

    def __init__(self) -> None:
        self._top = 0
        self._gaps: list[tuple[int, int]] = []  # (address, bytes) of free ranges below the top

    def take(self, nbytes: int) -> int:
        """Return the lowest address with `nbytes` free bytes."""
        for number, (address, free_bytes) in enumerate(self._gaps):
            if free_bytes >= nbytes:
                rest = (address + nbytes, free_bytes - nbytes)
                self._gaps[number : number + 1] = [rest] if rest[1] else []
                return address
        self._top += nbytes
        return self._top - nbytes

    def give(self, address: int, nbytes: int) -> None:
        """Free a range."""
        insort(self._gaps, (address, nbytes))
        merged: list[tuple[int, int]] = []
        for start, free_bytes in self._gaps:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + free_bytes)
            else:
                merged.append((start, free_bytes))
        if merged and sum(merged[-1]) == self._top:
            self._top = merged.pop()[0]
        self._gaps = merged
