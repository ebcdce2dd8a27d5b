"""Addresses for known lifetimes, and the lives of a pool's blocks by call site."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from swapkit._native.lib import NULL, check, ffi, lib
from swapkit._native.pool import Pool

if TYPE_CHECKING:
    from swapkit._native._lib import CData

# ---- layout --------------------------------------------------------------------------------------
#
# Addresses for known lifetimes: arrays in, offsets out. See `swapkit_layout.h` for the rules.
#
# Arrays are objects with a buffer of the right type; this module does not use numpy. Calls release
# the GIL, and several threads may use one object at once.

MOST_BYTES = 1 << 60
FIRST_FIT, BEST_FIT = lib.SK_LAYOUT_FIRST_FIT, lib.SK_LAYOUT_BEST_FIT
FOUND, IMPOSSIBLE = lib.SK_LAYOUT_FOUND, lib.SK_LAYOUT_IMPOSSIBLE
RULES, MOST_EXACT = lib.SK_LAYOUT_RULES, lib.SK_LAYOUT_MOST_EXACT


class StopFlag:
    """Ends the searches that were given it, from any thread."""

    def __init__(self) -> None:
        """Make a flag that is not set."""
        self.pointer: CData = ffi.new("int32_t *")

    def set(self) -> None:
        """End the searches soon."""
        self.pointer[0] = 1

    @property
    def is_set(self) -> bool:
        """Whether searches end."""
        return bool(self.pointer[0])


def _effort(most_work: int, target: int, seed: int, stop: StopFlag) -> CData:
    """Return how far a search goes; `stop` must live as long."""
    effort: CData = ffi.new("sk_layout_effort *", [most_work, target, seed, stop.pointer])
    return effort


class NativeItems:
    """Items with lifetimes and sizes, none of which changes. Any thread."""

    def __init__(
        self, starts: Any, ends: Any, nbytes: Any, fixed: Any | None, period: int = 0
    ) -> None:
        """Take int64 arrays, one element for each item; they must not be resized later.

        Args:
            starts: when items begin to live.
            ends: when they no longer do.
            nbytes: their sizes.
            fixed: offsets of items that must not move, -1 for the others; None: all may move.
            period: after which time begins again; 0: it does not.

        Raises:
            InvalidArgument: an item that has no life or no bytes, or too many.
            OutOfHostMemory: no memory for the items.
        """
        buffers = [ffi.from_buffer("int64_t[]", each) for each in (starts, ends, nbytes)]
        at = ffi.from_buffer("int64_t[]", fixed) if fixed is not None else NULL
        self._buffers = (*buffers, at)
        self._items = ffi.new("sk_layout_items *", [len(buffers[0]), *self._buffers, period])
        out = ffi.new("sk_layout **")
        check(lib.sk_layout_make(self._items, out))
        self._layout = ffi.gc(out[0], lib.sk_layout_free)

    def measure(self, loads: Any | None = None) -> int:
        """Return the most bytes alive at any time.

        Args:
            loads: int64; set to the most bytes alive at any time of each item's life.
        """
        bound = ffi.new("int64_t *")
        filled = NULL if loads is None else _writable("int64_t[]", loads)
        check(lib.sk_layout_measure(self._layout, bound, filled))
        return int(bound[0])

    def place(self, order: Any, fit: int, offsets: Any) -> int:
        """Place items in an order (int32) and fill `offsets` (int64); return the work.

        Raises:
            InvalidArgument: `order` is not a permutation, or fixed items overlap.
        """
        work = ffi.new("int64_t *")
        order = ffi.from_buffer("int32_t[]", order)
        check(lib.sk_layout_place(self._layout, order, fit, _writable("int64_t[]", offsets), work))
        return int(work[0])

    def press(self, offsets: Any, *, most_work: int, target: int, seed: int, stop: StopFlag) -> int:
        """Lower a layout by moving items that are in the way of others; return the work.

        Args:
            offsets: int64, a layout without overlaps; set to the lowest one.
            most_work: the search ends after it.
            target: the search ends at this height.
            seed: of the search's random numbers.
            stop: ends the search early.
        """
        effort = _effort(most_work, target, seed, stop)
        work = ffi.new("int64_t *")
        filled = _writable("int64_t[]", offsets)
        check(lib.sk_layout_press(self._layout, effort, filled, work))
        return int(work[0])

    def search(
        self, capacity: int, rule: int, offsets: Any, *, most_work: int, stop: StopFlag
    ) -> int:
        """Look for a layout within `capacity`; return `FOUND`, `IMPOSSIBLE` or another value.

        Args:
            capacity: most bytes.
            rule: below `RULES`: the order in which the search tries items.
            offsets: int64; set to the layout if there is one.
            most_work: placements after which the search ends.
            stop: ends the search early.

        Raises:
            InvalidArgument: more than `MOST_EXACT` items, fixed ones, or a period.
        """
        effort = _effort(most_work, capacity, 0, stop)
        outcome = ffi.new("sk_layout_outcome *")
        filled = _writable("int64_t[]", offsets)
        check(lib.sk_layout_search(self._layout, effort, rule, filled, outcome))
        return int(outcome[0])

    def verify(self, offsets: Any) -> int:
        """Check a layout (int64) by an independent sweep; return its height.

        Raises:
            CorruptState: items overlap, or one is not where it must be.
        """
        height = ffi.new("int64_t *")
        offsets = ffi.from_buffer("int64_t[]", offsets)
        check(lib.sk_layout_verify(self._items, offsets, height))
        return int(height[0])


def _writable(kind: str, array: Any) -> CData:
    return ffi.from_buffer(kind, array, require_writable=True)


# ---- lives ---------------------------------------------------------------------------------------
#
# The lives of a pool's blocks by call site, and addresses planned for them (`swapkit_lives.h`).
#
# Arrays are objects with a buffer of the right type; this module does not use numpy.

TAG_BACKWARD: int = lib.SK_TAG_BACKWARD  # bits of a tag
TAG_OPTIMIZER: int = lib.SK_TAG_OPTIMIZER


class LivesMode(enum.IntEnum):
    """What a pool does with lives: nothing, note them, or also separate their memory."""

    OFF = lib.SK_LIVES_OFF
    NOTED = lib.SK_LIVES_NOTED
    SEPARATE = lib.SK_LIVES_SEPARATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A member of a C structure, an unsigned number or an array of them. Bytes, of one number."""

    name: str
    offset: int
    nbytes: int
    count: int = 1


def _fields_of(name: str) -> tuple[Field, ...]:
    fields = []
    for member, field in ffi.typeof(name).fields:
        array = field.type.kind == "array"
        item = field.type.item if array else field.type
        fields.append(
            Field(
                name=member,
                offset=field.offset,
                nbytes=ffi.sizeof(item),
                count=field.type.length if array else 1,
            )
        )
    return tuple(fields)


LIFE_FIELDS = _fields_of("sk_life")
LIFE_BYTES: int = ffi.sizeof("sk_life")
PLACE_FIELDS = _fields_of("sk_place")
PLACE_BYTES: int = ffi.sizeof("sk_place")
NO_STEP = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMarks:
    """When steps began, counted in takes and frees: this step, the last one, the one before."""

    step: int
    began_at: tuple[int, int, int]
    now: int


class LayoutStats(NamedTuple):
    """Requests since the layout was set.

    Hits lie as planned; holes elsewhere in the layout's memory, where no other request needs it;
    misses were planned and lie outside; the others were not planned.
    """

    height_bytes: int
    places: int
    hits: int
    hit_bytes: int
    holes: int
    hole_bytes: int
    misses: int
    missed_bytes: int
    unplanned: int
    unplanned_bytes: int

    @property
    def planned_bytes(self) -> int:
        """The bytes of the requests in the layout's memory."""
        return self.hit_bytes + self.hole_bytes

    @property
    def served_bytes(self) -> int:
        """The bytes of all requests."""
        return self.planned_bytes + self.missed_bytes + self.unplanned_bytes

    @property
    def hit_share(self) -> float:
        """The share of bytes that lie in the layout's memory; 1: there were no requests."""
        return self.planned_bytes / self.served_bytes if self.served_bytes else 1.0


class Lives:
    """The lives of one pool. All methods may be called from any thread."""

    def __init__(self, pool: Pool) -> None:
        """Refer to a pool, which must stay open."""
        self._pool = pool

    def set_mode(self, mode: LivesMode) -> None:
        """Note lives from now on, or forget them and the layout.

        A second call forgets which lives were the longest, as before steps of another kind.
        """
        lib.sk_pool_set_lives(self._pool.pointer, mode)

    def set_backward(self, function: int) -> None:
        """Set the C function that tells whether a thread runs a backward pass (`swapkit_lives.h`).

        Args:
            function: its address; 0: none. It runs on threads that take memory without a tag, with
                the pool's lock held.
        """
        lib.sk_pool_set_backward(self._pool.pointer, ffi.cast("sk_backward_fn", function))

    def read(self) -> tuple[bytes, StepMarks]:
        """Return the lives as an array of `sk_life`, and when steps began."""
        times = ffi.new("sk_step_times *")
        capacity = lib.sk_pool_lives(self._pool.pointer, NULL, 0, NULL)
        out = ffi.new("sk_life[]", capacity + 1)
        count = min(lib.sk_pool_lives(self._pool.pointer, out, capacity, times), capacity)
        began_at = times.began_at
        return bytes(ffi.buffer(out, count * LIFE_BYTES)), StepMarks(
            step=times.step, began_at=(began_at[0], began_at[1], began_at[2]), now=times.now
        )

    def set_layout(self, places: Any, count: int, height_bytes: int) -> None:
        """Serve requests at planned addresses from now on; no places: not any more.

        Args:
            places: a buffer of `sk_place`; those of a call site follow one another by their turns.
            count: the number of places.
            height_bytes: the end of the highest place.

        Raises:
            InvalidArgument: lives are off, or a place lies outside the height.
            Unsupported: the pool has no virtual memory.
        """
        buffer = ffi.from_buffer("sk_place[]", places) if count else NULL
        check(lib.sk_pool_set_layout(self._pool.pointer, buffer, count, height_bytes))

    def trim_unplanned(self) -> None:
        """Wait for pending blocks, then give cached memory back, except that of the layout."""
        check(lib.sk_pool_trim_unplanned(self._pool.pointer))

    def layout_stats(self) -> LayoutStats:
        """Return the counts since the layout was set."""
        stats = ffi.new("sk_layout_stats *")
        lib.sk_pool_layout_stats(self._pool.pointer, stats)
        return LayoutStats._make(getattr(stats, name) for name in LayoutStats._fields)
