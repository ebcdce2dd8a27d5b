"""torch's allocator with `expandable_segments:True`: a segment per stream and pool that grows.

A segment is address space, as large as the device and an eighth. Memory is mapped into it in pages
of 2 MiB (small blocks) or 20 MiB, at the lowest address where the request fits. When the device has
no more memory, the pages in which no block is in use are unmapped.
"""

from __future__ import annotations

from benchmarks.replay.caching import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    CachedBlock,
    CachingAllocator,
    Shelf,
)
from swapkit.units import round_up

_UNLIMITED_DEVICE_BYTES = 1 << 44  # to size address space, where the device has no limit


class ExpandableAllocator(CachingAllocator):
    """The model with `expandable_segments`."""

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        super().__init__(budget_bytes=budget_bytes)
        device_bytes = _UNLIMITED_DEVICE_BYTES if budget_bytes is None else budget_bytes
        self._space_bytes = device_bytes + device_bytes // 8
        self._next_address = 0

    def _prefer(self, shelf: Shelf, place: int) -> int:
        # For best fit a block is as large as it can become: `expandable_size` in `get_free_block`.
        while place + 1 < len(shelf.order):
            if _expandable_bytes(shelf.at(place + 1)) >= _expandable_bytes(shelf.at(place)):
                break
            place += 1
        return place

    def _should_split(self, block: CachedBlock, size: int) -> bool:
        return block.nbytes - size >= MIN_BLOCK_BYTES

    def _grow(self, shelf: Shelf, size: int) -> CachedBlock | None:
        """Map pages until a block has `size` bytes; `try_allocate_expandable_block`.

        If the device has too little, the pages mapped so far stay, as free memory.
        """
        block = self._find_space(shelf, size)
        if not block.is_mapped and not self._map(block, min(block.nbytes, size)):
            return None
        while block.nbytes < size:  # free, and then unmapped
            following = block.after
            assert following is not None, "the space was found to be large enough"
            if not self._map(following, min(size - block.nbytes, following.nbytes)):
                return None
            block = following  # merged with what was before it
        shelf.remove(block)
        return block

    def _find_space(self, shelf: Shelf, size: int) -> CachedBlock:
        """Return the lowest of free and unmapped blocks in a row that have `size` bytes together.

        Without such, it is a new segment; `find_expandable_block`.
        """
        for address in shelf.unmapped:
            block = shelf.unmapped_blocks[address]
            if block.before is not None and block.before.is_free:
                block = block.before
            if _has_space(block, size):
                return block
        page_bytes = _page_bytes(shelf)
        space_bytes = round_up(max(self._space_bytes, size), page_bytes)
        # Aligned, so that the pages of every segment begin at multiples of their size.
        address = round_up(self._next_address, page_bytes)
        self._next_address = address + space_bytes
        space = CachedBlock(address, space_bytes, shelf, is_mapped=False)
        shelf.add(space)
        return space

    def _map(self, block: CachedBlock, size: int) -> bool:
        """Map the first `size` bytes of an unmapped block, in whole pages; `map_block`."""
        mapped_bytes = round_up(size, _page_bytes(block.shelf))
        if not self._fits(mapped_bytes):
            return False
        block.shelf.remove(block)
        block.is_mapped = True
        if mapped_bytes < block.nbytes:
            rest = CachedBlock(
                block.address + mapped_bytes,
                block.nbytes - mapped_bytes,
                block.shelf,
                is_mapped=False,
            )
            rest.insert_after(block)
            block.nbytes = mapped_bytes
            block.shelf.add(rest)
        self._merge_both(block)
        block.shelf.add(block)
        self.reserved_bytes += mapped_bytes
        return True

    def _release(self, shelf: Shelf) -> None:
        for block in [shelf.blocks[address] for _, address in shelf.order]:
            self._unmap(block)

    def _unmap(self, block: CachedBlock) -> None:
        """Unmap the whole pages of a free block; `unmap_block`, `release_expandable_segment`."""
        page_bytes = _page_bytes(block.shelf)
        first = round_up(block.address, page_bytes)
        end = (block.address + block.nbytes) // page_bytes * page_bytes
        if first >= end:
            return
        shelf = block.shelf
        shelf.remove(block)
        if first > block.address:
            part = CachedBlock(block.address, first - block.address, shelf)
            part.insert_before(block)
            shelf.add(part)
        if end < block.address + block.nbytes:
            part = CachedBlock(end, block.address + block.nbytes - end, shelf)
            part.insert_after(block)
            shelf.add(part)
        block.address, block.nbytes, block.is_mapped = first, end - first, False
        self._merge_both(block)
        self.reserved_bytes -= end - first
        if not block.is_whole:
            shelf.add(block)


def _page_bytes(shelf: Shelf) -> int:
    return SMALL_SEGMENT_BYTES if shelf.is_small else LARGE_SEGMENT_BYTES


def _expandable_bytes(block: CachedBlock) -> int:
    after = block.after
    return block.nbytes + (after.nbytes if after is not None and not after.is_mapped else 0)


def _has_space(block: CachedBlock, size: int) -> bool:
    found = 0
    at: CachedBlock | None = block
    while found < size and at is not None and at.is_free:
        found += at.nbytes
        at = at.after
    return found >= size
