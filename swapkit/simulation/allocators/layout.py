"""Planned addresses as an allocator for replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit.units import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDING_BYTES = 512  # of the pool's blocks: SK_ROUND_BYTES in pool.h


class LayoutAllocator:
    """Gives the blocks of one trace the addresses that were planned for them.

    It takes from the device what lies below the highest end of a block so far.
    """

    def __init__(self, offsets: Sequence[int], *, budget_bytes: int | None = None) -> None:
        """Args: `offsets`: the address of each block of the trace, in the order of its takes."""
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self._offsets = iter(offsets)
        self._in_use: dict[int, int] = {}

    def take(self, nbytes: int, stream: int = 0) -> int | None:  # noqa: ARG002 - all are planned
        """Return the address of the next block; None: it lies above the budget."""
        address = next(self._offsets)
        rounded = round_up(nbytes, ROUNDING_BYTES)
        reserved = max(self.reserved_bytes, address + rounded)
        if self.budget_bytes is not None and reserved > self.budget_bytes:
            return None
        self.reserved_bytes = reserved
        self._in_use[address] = rounded
        self.allocated_bytes += rounded
        return address

    def give(self, address: int) -> None:
        """Take back the block at an address."""
        self.allocated_bytes -= self._in_use.pop(address)
