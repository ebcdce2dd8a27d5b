"""torch's allocator as it is by default: one call of `cudaMalloc` for each segment."""

from __future__ import annotations

from bisect import insort

from swapkit.simulation.allocators.caching import (
    CachedBlock,
    CachingAllocator,
    CachingSettings,
    Shelf,
)
from swapkit.simulation.allocators.rounding import MIN_BLOCK_BYTES, SMALL_BYTES, segment_bytes


class NativeAllocator(CachingAllocator):
    """The model without `expandable_segments`."""

    def __init__(
        self, *, budget_bytes: int | None = None, settings: CachingSettings | None = None
    ) -> None:
        super().__init__(budget_bytes=budget_bytes, settings=settings)
        self._addresses = DeviceAddresses()

    def _should_split(self, block: CachedBlock, size: int) -> bool:
        rest = block.nbytes - size
        if block.shelf.is_small:
            return rest >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_bytes
        return (limit is None or size < limit) and rest > SMALL_BYTES

    def _grow(self, shelf: Shelf, size: int) -> CachedBlock | None:
        nbytes = segment_bytes(size)
        if not self._fits(nbytes):
            return None
        self.reserved_bytes += nbytes
        return CachedBlock(self._addresses.take(nbytes), nbytes, shelf)

    def _release_some(self, shelf: Shelf, size: int) -> bool:
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        needed = max(size, limit)
        place = shelf.find(needed)
        if place < len(shelf.order):
            self._release_block(shelf.at(place))
            return True
        released = 0  # no single block is large enough: several, the largest first
        while released < needed and shelf.order and shelf.order[-1][0] >= limit:
            released += shelf.order[-1][0]
            self._release_block(shelf.at(-1))
        return released >= needed

    def _release(self, shelf: Shelf) -> None:
        for block in [each for each in shelf.blocks.values() if each.is_whole]:
            self._release_block(block)

    def _release_block(self, block: CachedBlock) -> None:
        """Give a segment back to the device; `release_block`."""
        block.shelf.remove(block)
        self.reserved_bytes -= block.nbytes
        self._addresses.give(block.address, block.nbytes)


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
