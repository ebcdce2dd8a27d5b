"""What both models of torch's allocators share: free lists, best fit, splits and merges.

The models do what `c10/cuda/CUDACachingAllocator.cpp` of torch does with its default settings;
comments name its functions. A block is free as soon as it is given, as if all work on it were done.
Private pools of CUDA graphs are left out.

A *block* is a part of a segment, in use or free; its neighbours in the segment are `before` and
`after`. The free blocks of one stream and one pool (small or large) are a *shelf*, ordered as torch
orders them, by size and then by address (`BlockComparatorSize`).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from swapkit.units import round_up

MIB = 1 << 20
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request that goes to the pool of small blocks
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size(), which was kLargeBuffer


class CachedBlock:
    """A part of a segment; `is_mapped` is False for address space of an expandable segment."""

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "nbytes", "shelf")

    def __init__(self, address: int, nbytes: int, shelf: Shelf, *, is_mapped: bool = True) -> None:
        self.address = address
        self.nbytes = nbytes
        self.shelf = shelf
        self.is_mapped = is_mapped
        self.is_free = True
        self.before: CachedBlock | None = None
        self.after: CachedBlock | None = None

    def insert_after(self, block: CachedBlock) -> None:
        """Make this block the next one of the segment after `block`."""
        self.before, self.after = block, block.after
        if block.after is not None:
            block.after.before = self
        block.after = self

    def insert_before(self, block: CachedBlock) -> None:
        """Make this block the last one of the segment before `block`."""
        self.before, self.after = block.before, block
        if block.before is not None:
            block.before.after = self
        block.before = self

    @property
    def is_whole(self) -> bool:
        """Whether this is the only block of its segment."""
        return self.before is None and self.after is None


class Shelf:
    """The free blocks of one stream and pool, and the unmapped ones in order of address."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.order: list[tuple[int, int]] = []  # (bytes, address) of each free block
        self.blocks: dict[int, CachedBlock] = {}
        self.unmapped: list[int] = []  # addresses
        self.unmapped_blocks: dict[int, CachedBlock] = {}

    def add(self, block: CachedBlock) -> None:
        """Add a free block."""
        if block.is_mapped:
            insort(self.order, (block.nbytes, block.address))
            self.blocks[block.address] = block
        else:
            insort(self.unmapped, block.address)
            self.unmapped_blocks[block.address] = block

    def remove(self, block: CachedBlock) -> None:
        """Remove a free block, which must not have changed since `add`."""
        if block.is_mapped:
            del self.order[bisect_left(self.order, (block.nbytes, block.address))]
            del self.blocks[block.address]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]
            del self.unmapped_blocks[block.address]

    def find(self, nbytes: int) -> int:
        """Return the place in `order` of the smallest block of at least `nbytes`."""
        return bisect_left(self.order, (nbytes, 0))

    def at(self, place: int) -> CachedBlock:
        """Return the free block at a place in `order`."""
        return self.blocks[self.order[place][1]]


class CachingAllocator:
    """A model of one device's allocator. Subclasses say how it grows, splits and shrinks.

    All amounts are bytes. `budget_bytes` is the memory of the device: it refuses what would make
    `reserved_bytes` larger. None: it has as much as is asked for.
    """

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self._shelves: dict[tuple[bool, int], Shelf] = {}
        self._in_use: dict[int, CachedBlock] = {}

    def take(self, nbytes: int, stream: int = 0) -> int | None:
        """Return the address of a block for a request, None if there is no memory; `malloc`."""
        size = round_up(nbytes, MIN_BLOCK_BYTES)
        shelf = self._shelf(size, stream)
        block = self._find(shelf, size) or self._grow(shelf, size)
        if block is None:
            self.release_cached()
            block = self._grow(shelf, size)
        if block is None:
            return None
        if self._should_split(block, size):
            self._split(block, size)
        block.is_free = False
        self._in_use[block.address] = block
        self.allocated_bytes += block.nbytes
        return block.address

    def give(self, address: int) -> None:
        """Take a block back and merge it with free neighbours; `free`, `free_block`."""
        block = self._in_use.pop(address)
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        self._merge_both(block)
        block.shelf.add(block)

    def release_cached(self) -> None:
        """Give the memory of free blocks back to the device; `release_cached_blocks`."""
        for is_small in (False, True):
            for (small, _), shelf in list(self._shelves.items()):
                if small is is_small:
                    self._release(shelf)

    def _shelf(self, size: int, stream: int) -> Shelf:
        """Return the free blocks that may serve a size; `get_pool`."""
        is_small = size <= SMALL_BYTES
        shelf = self._shelves.get((is_small, stream))
        if shelf is None:
            shelf = self._shelves[is_small, stream] = Shelf(is_small=is_small)
        return shelf

    def _find(self, shelf: Shelf, size: int) -> CachedBlock | None:
        """Take the best fit from a shelf; `get_free_block`."""
        place = shelf.find(size)
        if place == len(shelf.order):
            return None
        block = shelf.at(self._prefer(shelf, place))
        shelf.remove(block)
        return block

    def _split(self, block: CachedBlock, size: int) -> None:
        """Cut a block that is on no shelf down to `size`; `alloc_found_block`."""
        rest = CachedBlock(block.address + size, block.nbytes - size, block.shelf)
        rest.insert_after(block)
        block.nbytes = size
        block.shelf.add(rest)

    def _merge_both(self, block: CachedBlock) -> None:
        """Merge a block that is on no shelf with its neighbours, where possible."""
        self._merge(block, block.before)
        self._merge(block, block.after)

    def _merge(self, block: CachedBlock, other: CachedBlock | None) -> None:
        """Let `block` take over a free neighbour; `try_merge_blocks`."""
        if other is None or not other.is_free or other.is_mapped is not block.is_mapped:
            return
        other.shelf.remove(other)
        if block.before is other:
            block.address = other.address
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.nbytes += other.nbytes

    def _prefer(self, shelf: Shelf, place: int) -> int:  # noqa: ARG002 - only subclasses look at it
        """Return the place of the block to use, at or behind that of the smallest that fits."""
        return place

    def _should_split(self, block: CachedBlock, size: int) -> bool:
        """Return whether the rest of a block is cut off; `should_split`."""
        raise NotImplementedError

    def _grow(self, shelf: Shelf, size: int) -> CachedBlock | None:
        """Return a new block of at least `size` that is on no shelf; `alloc_block`."""
        raise NotImplementedError

    def _release(self, shelf: Shelf) -> None:
        """Give back what one shelf can spare; `release_blocks`."""
        raise NotImplementedError

    def _fits(self, nbytes: int) -> bool:
        """Return whether the device has `nbytes` more."""
        return self.budget_bytes is None or self.reserved_bytes + nbytes <= self.budget_bytes
