"""The caching allocator's handle: statistics, blocks, history, observers of its threads."""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from swapkit._native.backend import Backend, Handle, Stream
from swapkit._native.lib import NULL, AllocationWitness, check, ffi, lib
from swapkit._native.rings import Ring, RingEvent, RingEvents, RingKind

if TYPE_CHECKING:
    from swapkit._native._lib import CData

# ---- pool stats ----------------------------------------------------------------------------------
#
# A pool's statistics under torch's flat names.

STAT_NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
STAT_POOLS = ("all", "small_pool", "large_pool")
STAT_FIELDS = ("current", "peak", "allocated", "freed")
COUNT_NAMES = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_rescues",
    "rescued_bytes",
    "budget_bytes",
    "max_split_size",
    "expandable_segments",
    "num_garbage_collections",
    "garbage_collected_bytes",
    "moved_bytes",
    "moving_ns",
    "maps",
    "unmaps",
    "alias_failures",
    "num_settles",
    "largest_given_bytes",
    "num_splits",
)


def flat_stats(stats: Any) -> dict[str, int]:
    """Return a `sk_pool_stats` under names such as `allocated_bytes.all.peak`."""
    flat = {
        f"{name}.{pool}.{field}": getattr(getattr(stats, name)[i], field)
        for name in STAT_NAMES
        for i, pool in enumerate(STAT_POOLS)
        for field in STAT_FIELDS
    }
    flat.update({name: getattr(stats, name) for name in COUNT_NAMES})
    return flat


# ---- pool view -----------------------------------------------------------------------------------
#
# The blocks, the segments and the history of a pool, as plain values.

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


# ---- witnesses -----------------------------------------------------------------------------------
#
# The observers of a pool's threads while they make memory.


class _Told(threading.local):
    """The witnesses that got this thread's begin, until its end."""

    witnesses: tuple[AllocationWitness, ...] = ()


class Witnesses:
    """The witnesses of one pool. Any thread may change them, also while others allocate.

    They change under a lock, together with the core's callback. Threads that allocate read the
    whole tuple without the lock. The lock is reentrant, for a signal handler on the thread that
    holds it; it is not held during calls of witnesses.
    """

    def __init__(self) -> None:
        """Begin without witnesses."""
        self._lock = threading.RLock()
        self._witnesses: tuple[AllocationWitness, ...] = ()
        self._told = _Told()

    def add(self, witness: AllocationWitness, apply: Callable[[bool], None]) -> None:
        """Add a witness for all later begins; `apply` gets whether there are any witnesses."""
        with self._lock:
            self._witnesses = (*self._witnesses, witness)
            apply(True)  # noqa: FBT003 - C's

    def remove(self, witness: AllocationWitness | None, apply: Callable[[bool], None]) -> None:
        """Remove one witness, None: all, for later begins; it still gets the ends it waits for."""
        with self._lock:
            left = self._witnesses if witness is not None else ()
            self._witnesses = tuple(each for each in left if each is not witness)
            apply(bool(self._witnesses))

    def tell(self, *, begins: bool) -> None:
        """Forward a begin to the current witnesses, and an end to those of its begin."""
        if begins:
            self._told.witnesses = self._witnesses
        for each in self._told.witnesses:
            (each.stop if begins else each.go_on)()
        if not begins:
            self._told.witnesses = ()


# ---- pool ----------------------------------------------------------------------------------------
#
# The caching allocator's handle.

__all__ = [
    "BlockInfo",
    "BlockState",
    "Pool",
    "PoolView",
    "Ring",
    "RingEvent",
    "RingKind",
    "SegmentInfo",
    "set_tag",
    "tentative",
]

_Info = TypeVar("_Info")
_NS_PER_S = 1e9


def set_tag(tag: int) -> int:
    """Label the blocks that this thread takes from now on; return the previous label."""
    return lib.sk_tag_set(tag)


@contextlib.contextmanager
def tentative() -> Iterator[None]:
    """Let this thread take only memory that needs no wait and no rescue."""
    previous = lib.sk_tentative_set(True)  # noqa: FBT003 - C functions have no keywords
    try:
        yield
    finally:
        lib.sk_tentative_set(previous)


class Pool(Handle):
    """A caching allocator over one backend, whose reserved bytes never exceed its budget.

    All methods may be called from any thread. Sizes are bytes, addresses plain ints.
    """

    _what = "pool"

    def __init__(
        self,
        backend: Backend,
        *,
        budget_bytes: int = 0,
        whole_segments: bool = False,
        max_split_bytes: int = 0,
        garbage_collection_threshold: float = 0.0,
        roundup_divisions: Sequence[int] = (),
    ) -> None:
        """Open a pool.

        Args:
            backend: of the device; the pool keeps it open.
            budget_bytes: most bytes reserved; 0: no budget.
            whole_segments: allocate segments whole even if the backend has virtual memory.
            max_split_bytes: of whole segments, larger blocks are not split; more than 20 MiB, 0: no
                such limit.
            garbage_collection_threshold: share of the budget above which the pool gives cached
                memory back before it grows; 0: never.
            roundup_divisions: at most 16 numbers. Number k is for requests from 1 << k MiB (the
                first also for smaller ones, the last also for larger ones): they are rounded up to
                the next of so many equal parts of their power of two. 0, 1 or missing: no rounding.

        Raises:
            InvalidArgument: one of the last three is out of range.
        """
        params = ffi.new("sk_pool_params *")
        params.budget_bytes = budget_bytes
        params.whole_segments = whole_segments
        params.max_split_bytes = max_split_bytes
        params.garbage_collection_threshold = garbage_collection_threshold
        params.roundup_divisions = list(roundup_divisions)
        out = ffi.new("sk_pool **")
        check(lib.sk_pool_create(backend.pointer, params, out))
        super().__init__(out[0])
        self.backend = backend
        self._streams: set[Stream] = set()
        self._context = ffi.new_handle(weakref.ref(self))
        self._rescue: Callable[[int], int] | None = None
        self._ring: Ring | None = None
        self._history: Ring | None = None
        self._witnesses = Witnesses()

    def take(self, nbytes: int, stream: Stream | None = None) -> int:
        """Take a block; return its address.

        Raises:
            OverBudget: it does not fit the budget, even after trims and rescues.
            OutOfDeviceMemory: the device has no more.
            InvalidArgument: `nbytes` is out of range.
        """
        out = ffi.new("void **")
        check(lib.sk_pool_take(self.pointer, nbytes, self._keep(stream), out))
        return int(ffi.cast("uintptr_t", out[0]))

    def give(self, address: int) -> None:
        """Give a block back.

        Raises:
            InvalidArgument: no block in use begins at `address`.
        """
        check(lib.sk_pool_give(self.pointer, ffi.cast("void *", address)))

    def use(self, address: int, stream: Stream | None) -> None:
        """Note that `stream` also uses a block; its reuse will wait for that work."""
        check(lib.sk_pool_use(self.pointer, ffi.cast("void *", address), self._keep(stream)))

    def _keep(self, stream: Stream | None) -> CData:
        """Return the native stream, which must stay open as long as the pool."""
        if stream is None:
            return NULL
        if stream not in self._streams:
            self._streams.add(stream)
            stream.hold()
        return stream.pointer

    def trim(self) -> None:
        """Wait for pending blocks, then give all cached memory to the device."""
        check(lib.sk_pool_trim(self.pointer))

    @property
    def budget_bytes(self) -> int:
        """Most bytes reserved; 0: no budget."""
        return self.stats()["budget_bytes"]

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget, trimming first if necessary; 0: no budget.

        Raises:
            OverBudget: more than that is in use; nothing was changed.
        """
        check(lib.sk_pool_set_budget(self.pointer, budget_bytes))

    def set_rescue(self, rescue: Callable[[int], int] | None) -> None:
        """Set the callback for allocations that would fail; it gets the needed bytes.

        It runs on the allocating thread, in the middle of the allocation, and returns the bytes
        that it freed, 0 if there is nothing more to free. It must not raise; errors are logged.
        """
        self._rescue = rescue
        callback = NULL if rescue is None else lib.sk_python_rescue
        lib.sk_pool_set_rescue(self.pointer, callback, self._context)

    def on_rescue(self, needed_bytes: int) -> int:
        """Forward a native rescue to the current callback."""
        rescue = self._rescue
        return 0 if rescue is None else rescue(needed_bytes)

    def watch(self, witness: AllocationWitness) -> None:
        """Call `witness` on an allocating thread when it begins and ends making memory."""
        self._witnesses.add(witness, self._set_making)

    def unwatch(self, witness: AllocationWitness | None = None) -> None:
        """Undo `watch`, None: for all; a second call does nothing. Calls under way still end."""
        self._witnesses.remove(witness, self._set_making)

    def _set_making(self, on: bool) -> None:  # noqa: FBT001 - called by Witnesses
        making = lib.sk_python_making if on else NULL
        lib.sk_pool_set_making(self.pointer, making, self._context)

    def on_making(self, *, begins: bool) -> None:
        """Forward a begin to the current witnesses, and an end to those of its begin."""
        self._witnesses.tell(begins=begins)

    def set_settle(self, function: int, context: int) -> None:
        """Set the C function that waits until queued work is in its stream (`swapkit_pool.h`).

        Args:
            function: its address. It runs on threads that take memory, without a lock.
            context: its argument, a number.
        """
        lib.sk_pool_set_settle(
            self.pointer, ffi.cast("sk_settle_fn", function), ffi.cast("void *", context)
        )

    def attach(self, ring: Ring) -> None:
        """Record events into `ring` from now on.

        Raises:
            InvalidArgument: the pool has the ring of another reader.
        """
        check(lib.sk_pool_set_ring(self.pointer, ring.pointer))
        self._ring = ring

    def detach(self) -> None:
        """Stop recording."""
        check(lib.sk_pool_set_ring(self.pointer, NULL))
        self._ring = None

    def set_history(self, ring: Ring | None) -> None:
        """Record events with addresses into `ring`, beside `attach`; None: no longer.

        Raises:
            InvalidArgument: the pool has a history already.
        """
        check(lib.sk_pool_set_history(self.pointer, NULL if ring is None else ring.pointer))
        self._history = ring

    def view(self) -> PoolView:
        """Return the blocks, the segments and the events of the history at one moment."""
        return read_view(self.pointer)

    def note(self, kind: RingKind, nbytes: int = 0) -> None:
        """Put an event of the owner's own into the ring, if one is attached.

        A mark also ends a step: the next step is expected to make the same requests.
        """
        is_recorded = self._ring is not None or self._history is not None
        if is_recorded or kind is RingKind.MARK:
            lib.sk_pool_note(self.pointer, kind, nbytes)

    def stats(self) -> dict[str, int]:
        """Return the statistics under torch's flat names, such as `allocated_bytes.all.peak`."""
        return flat_stats(self._read_stats())

    def _read_stats(self) -> Any:
        stats = ffi.new("sk_pool_stats *")
        lib.sk_pool_stats_get(self.pointer, stats)
        return stats

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more would leave room in the budget for operators."""
        return bool(lib.sk_pool_has_room(self.pointer, nbytes, True))  # noqa: FBT003

    def in_use_bytes(self) -> int:
        """Return the bytes handed out."""
        return int(self._read_stats().allocated_bytes[0].current)

    def reserved_bytes(self) -> int:
        """Return the bytes held of the device."""
        return int(self._read_stats().reserved_bytes[0].current)

    def maps(self) -> int:
        """Return how many granules were mapped at an address; see `stats`."""
        return int(self._read_stats().maps)

    def moving_seconds(self) -> float:
        """Return the seconds spent moving free memory; see `moving_ns` in `stats`."""
        return float(self._read_stats().moving_ns) / _NS_PER_S

    def reset_peak(self) -> None:
        """Set every peak to the current value."""
        lib.sk_pool_stats_reset_peak(self.pointer)

    def reset_accumulated(self) -> None:
        """Set the totals of allocated and freed memory, and the counts of events, to 0."""
        lib.sk_pool_stats_reset_accumulated(self.pointer)

    def peak_take(self) -> int:
        """Return the most bytes reserved since the last call; independent of `reset_peak`."""
        return lib.sk_pool_peak_take(self.pointer)

    def owns(self, address: int) -> bool:
        """Return whether `address` lies in one of the pool's segments."""
        return bool(lib.sk_pool_owns(self.pointer, ffi.cast("void *", address)))

    def blocks(self) -> tuple[BlockInfo, ...]:
        """Describe every block."""
        return self._describe("sk_block_info[]", lib.sk_pool_blocks, block_info)

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Describe every segment."""
        return self._describe("sk_segment_info[]", lib.sk_pool_segments, segment_info)

    def _describe(
        self, kind: str, fill: Callable[[CData, Any, int], int], read: Callable[[Any], _Info]
    ) -> tuple[_Info, ...]:
        """Return up to as many native descriptions as the pool had just before, converted."""
        capacity = fill(self.pointer, NULL, 0)
        out = ffi.new(kind, capacity + 1)
        count = min(fill(self.pointer, out, capacity), capacity)
        # Convert here: an element only refers to the array, and does not keep it alive.
        return tuple([read(out[i]) for i in range(count)])

    def check(self) -> None:
        """Walk every structure.

        Raises:
            CorruptState: an invariant is broken; the message names it.
        """
        check(lib.sk_pool_check(self.pointer))

    def _release(self, pointer: CData) -> None:
        check(lib.sk_pool_destroy(pointer))
        while self._streams:
            self._streams.pop().let_go()
