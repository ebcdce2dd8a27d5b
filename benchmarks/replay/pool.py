"""The real pool as an allocator for replays, on memory that is reserved but never touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._native.backend import Backend
from swapkit._native.pool import Pool, RingKind
from swapkit.errors import OutOfDeviceMemory, OverBudget

if TYPE_CHECKING:
    from swapkit._native.backend import Stream

GRANULE_BYTES = 2 << 20  # of CUDA devices and Ascend NPUs
_CAPACITY_BYTES = 1 << 46  # addresses of an x86-64 process: 47 bits


class ReplayedPool:
    """swapkit's pool over a CPU backend with the granules of an accelerator.

    It is the pool that trains, with its own free lists, moves of free memory and budget. Its memory
    is address space of this process: a block is committed but nothing writes to it, so pages never
    exist, and a replay of a device's trace needs no such device. Unlike a GPU's, this memory has
    one address at a time: where a GPU maps free memory a second time, the pool moves it.
    """

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        self._backend = Backend.cpu(capacity_bytes=_CAPACITY_BYTES, granule_bytes=GRANULE_BYTES)
        self.pool = Pool(self._backend, budget_bytes=budget_bytes or 0)
        self._streams: dict[int, Stream | None] = {0: None}
        self._in_use: set[int] = set()

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the pool holds of the device's memory."""
        return self.pool.reserved_bytes()

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the blocks in use."""
        return self.pool.in_use_bytes()

    def take(self, nbytes: int, stream: int = 0) -> int | None:
        """Return the address of a block; None: there is no memory for it."""
        if stream not in self._streams:
            self._streams[stream] = self._backend.stream()
        try:
            address = self.pool.take(nbytes, self._streams[stream])
        except (OverBudget, OutOfDeviceMemory):
            return None
        self._in_use.add(address)
        return address

    def give(self, address: int) -> None:
        """Take back the block at an address."""
        self.pool.give(address)
        self._in_use.discard(address)

    def end_step(self) -> None:
        """Tell the pool that a step ends: the next one is expected to make the same requests."""
        self.pool.note(RingKind.MARK)

    def close(self) -> None:
        """Give all blocks and the memory back."""
        while self._in_use:
            self.pool.give(self._in_use.pop())
        self.pool.close()
        for stream in self._streams.values():
            if stream is not None:
                stream.close()
        self._backend.close()
