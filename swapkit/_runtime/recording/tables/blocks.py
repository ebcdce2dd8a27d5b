"""The pool's blocks in a recorded step, and the memory of each operator."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from swapkit._native.pool import Pool, Ring, RingEvent, RingKind
from swapkit._runtime.saved.device import DevicePool
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE

# ---- blocks --------------------------------------------------------------------------------------
#
# The pool's blocks in a recorded step: after which operator each was taken and given back.
#
# A storage may lose its memory and live on: FSDP2 frees gathered weights with `resize_(0)`, other
# libraries exchange the data of a parameter. Only the pool knows. It also knows of memory that no
# operator was seen to take, such as that of a collective under way.

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
        self.of_weights: set[int] = set()  # addresses from before the step; weights may leave
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
        if block is None and address in self.of_weights:
            self.of_weights.discard(address)
            return False
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

    def take_back(self, nbytes: int) -> None:
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

    def owner(self, address: int) -> int | None:
        """Return the number of the storage of the trace that has its memory there, if known."""
        return self._numbers.get(address) if self.is_whole else None

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


# ---- workspaces ----------------------------------------------------------------------------------
#
# The memory of each operator of a recorded step, from the events of the pool.

_RING_EVENTS = 1 << 16
_OURS = 1  # in the `nbytes` field: identifies our own operator marks
NO_WORKSPACE = -1


class Workspaces:
    """The memory that each operator takes from the pool and returns before it ends.

    Read from the pool's event ring; unknown if the pool already has a ring with another reader.
    The blocks that are taken and given go to a table of their own.
    """

    def __init__(self, pool: DevicePool | None, blocks: Blocks) -> None:
        self._pool = pool if isinstance(pool, Pool) else None
        self.blocks = blocks
        self._ring: Ring | None = None
        self.in_use_bytes: int | None = None  # when the ring was attached
        self.peaks: list[int] = []  # by call of `end`: the most bytes in use since `begin`
        self.dropped: list[int] = []  # by call of `end`: bytes of older blocks given back meanwhile
        self._workspaces: list[int] = []  # by call of `end`: bytes
        self._most = self._before = 0
        self._rescued = self._dropped = 0  # since the operator began
        self._begun = 0
        self._is_open = False
        self._ended = 0  # operators that have ended, by the events read so far
        self._held: list[RingEvent] = []  # by other threads, after the open operator had ended
        self._seen = 0  # operators that have begun, likewise

    def start(self) -> None:
        """Attach a ring to the pool, unless another reader has attached one."""
        if self._pool is None:
            return
        ring = Ring(_RING_EVENTS)
        with contextlib.suppress(InvalidArgument):
            self._pool.attach(ring)
            self._ring = ring
            self.blocks.is_whole = True

    def stop(self) -> None:
        """Detach the ring; calls after the first do nothing."""
        if self._ring is not None and self._pool is not None:
            self._pool.detach()
            self.close()
            self.read()
            self._ring = None

    @property
    def is_on(self) -> bool:
        """Whether workspaces are being recorded."""
        return self._ring is not None

    def begin(self) -> None:
        """Note that an operator begins; `close` follows once it is noted."""
        assert self._pool is not None
        self._begun += 1
        self._is_open = True
        self._pool.note(RingKind.OP_BEGIN, _OURS)

    def end(self) -> int:
        """Note that the operator has ended; return its number for `bytes_of`."""
        assert self._pool is not None
        self._pool.note(RingKind.OP_END, _OURS)
        return self._begun - 1

    def close(self) -> None:
        """Note that the operator that began last is noted, if it is: what happens now is later."""
        self._is_open = False

    def bytes_of(self, number: int) -> int:
        """Return the workspace of an operator in bytes; 0: unknown."""
        is_known = self.blocks.is_whole and 0 <= number < len(self._workspaces)
        return self._workspaces[number] if is_known else 0

    def read(self) -> None:
        """Read the pool's events since the last call. The recorder's lock is held."""
        if self._ring is None:
            return
        events, lost = self._ring.read()
        if lost:
            self.blocks.is_whole = False  # numbers no longer match
        events = self._held + events
        self._held = []
        for at, event in enumerate(events):
            if self._is_open and self._ended == self._begun:
                self._held = events[at:]
                break
            self._note(event)

    def _note(self, event: RingEvent) -> None:
        if self.in_use_bytes is None:
            self.in_use_bytes = _bytes_before(event)
        level = event.in_use_bytes + self._rescued
        self._most = max(self._most, level)
        if event.kind in _OF_BLOCKS:
            self._note_block(event)
        elif event.kind is RingKind.RESCUE:  # inside an operator: not memory of its own
            self._rescued += min(event.nbytes, max(0, self._most - level))
        elif event.nbytes != _OURS:
            return
        elif event.kind is RingKind.OP_BEGIN:
            self._most = self._before = event.in_use_bytes
            self._rescued = self._dropped = 0
            self._seen += 1
        elif event.kind is RingKind.OP_END:
            self.peaks.append(self._most)
            self.dropped.append(self._dropped)
            self._workspaces.append(self._most - max(self._before, level))
            self._ended += 1

    def _note_block(self, event: RingEvent) -> None:
        call = self._seen if self._seen > self._ended else 0
        if event.kind is RingKind.TAKE:
            self.blocks.take(event.address, event.nbytes, event.requested_bytes, call)
        elif event.kind is RingKind.GIVE:
            if self.blocks.give(event.address, event.nbytes, call):
                self._dropped += event.nbytes
        else:
            self.blocks.take_back(event.nbytes)


_OF_BLOCKS = {RingKind.TAKE, RingKind.GIVE, RingKind.COPY_IN}


def _bytes_before(event: RingEvent) -> int:
    """Return the bytes in use before an event."""
    change = {RingKind.TAKE: event.nbytes, RingKind.GIVE: -event.nbytes}
    return event.in_use_bytes - change.get(event.kind, 0)
