"""The pool's blocks in a recorded step: after which operator each was taken and given back.

A storage may lose its memory and live on: FSDP2 frees gathered weights with `resize_(0)`, other
libraries exchange the data of a parameter. Only the pool knows. It also knows of memory that no
operator was seen to take, such as that of a collective under way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from swapkit.ir.traces import BEFORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALIVE = -2  # the `death` of what still exists
_LATEST = 64  # other threads take blocks between the one for a copy back and the copy


class TakenBlock:
    """One block. `birth`, `death`: as of a storage in a trace."""

    __slots__ = ("birth", "call", "death", "is_owned", "nbytes", "requested_bytes")

    def __init__(self, birth: int, nbytes: int, requested_bytes: int, call: int) -> None:
        self.birth = birth
        self.death = ALIVE
        self.nbytes = nbytes
        self.requested_bytes = requested_bytes
        self.call = call  # the operator's call inside of which it was taken; 0: outside of any
        self.is_owned = False  # by a storage of the trace, or by the session itself


class GivenBlock(NamedTuple):
    """A block of a storage of the trace that was given back before operator `death`."""

    number: int
    address: int
    death: int


class Blocks:
    """The blocks of one step, from the pool's events in order. Callers hold the recorder's lock."""

    def __init__(self, count: Callable[[], int]) -> None:
        """Start empty. `count`: returns the number of operators noted so far."""
        self.is_whole = False  # all events are heard, and none was lost
        self.gone_bytes = 0  # that went before the first operator, and that no storage had
        self._count = count
        self._present: dict[int, TakenBlock] = {}  # by address: taken in the step, in use
        self._latest: deque[TakenBlock] = deque(maxlen=_LATEST)  # taken most recently
        self.are_ours = False  # whether the recorder itself takes blocks now
        self._over: list[TakenBlock] = []
        self._numbers: dict[int, int] = {}  # storages of the trace, by the addresses of blocks
        self._given: list[GivenBlock] = []

    def take(self, address: int, nbytes: int, requested_bytes: int, call: int) -> None:
        """Note that a block was taken; `call`: the call of an operator that runs; 0: none does."""
        block = TakenBlock(self._count(), nbytes, requested_bytes, call)
        block.is_owned = self.are_ours
        self._present[address] = block
        self._latest.append(block)

    def give(self, address: int, nbytes: int, call: int) -> bool:
        """Note that a block was given back; return whether it is older than the running call.

        `call`: as of `take`.
        """
        block = self._present.pop(address, None)
        if block is None:
            block = TakenBlock(BEFORE, nbytes, nbytes, 0)
        number = self._numbers.pop(address, None)
        block.death = self._count() + (call > 0)
        is_older = not (call and call == block.call)
        if number is not None:
            self._given.append(GivenBlock(number, address, block.death))
        elif block.death == 0 and block.birth == BEFORE:
            self.gone_bytes += nbytes
        elif is_older:  # else part of the operator's workspace
            self._over.append(block)
        return is_older

    def come_back(self, nbytes: int) -> None:
        """Note that a session began to copy a storage of this size into the latest such block.

        In the trace that storage has been there all the time.
        """
        for block in reversed(self._latest):
            if block.requested_bytes == nbytes and not block.is_owned:
                block.is_owned = True
                return

    def attach(self, address: int, number: int) -> int | None:
        """Note that a block is that of a storage; return its birth. None: not known."""
        self._numbers[address] = number
        block = self._present.get(address)
        if block is None:
            # Older, though an operator of the step may be the first to write to it: DDP's buckets.
            return BEFORE if self.is_whole and not self._is_inside(address) else None
        block.is_owned = True
        return block.birth

    def _is_inside(self, address: int) -> bool:
        """Return whether an address is in the middle of a block that was taken in the step."""
        return any(start < address < start + block.nbytes for start, block in self._present.items())

    def has(self, address: int) -> bool:
        """Return whether a storage of the trace has its memory there; False if it is unknown."""
        return self.is_whole and address in self._numbers

    def pop_given(self) -> list[GivenBlock]:
        """Return the blocks of storages that were given back since the last call."""
        given, self._given = self._given, []
        return given

    def stop(self) -> None:
        """Count no more operators: this breaks the cycle with the owner of the count."""
        count = self._count()
        self._count = lambda: count

    def unowned(self) -> Iterator[TakenBlock]:
        """Yield the blocks that belong to no storage of the trace and were there at an operator."""
        if not self.is_whole:
            return
        count = self._count()
        for block in (*self._over, *self._present.values()):
            death = count if block.death == ALIVE else block.death
            if not block.is_owned and max(block.birth, 0) < min(death, count):
                yield block
