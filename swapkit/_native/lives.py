"""The lives of a pool's blocks by call site, and addresses planned for them (`swapkit_lives.h`).

Arrays are objects with a buffer of the right type; this module does not use numpy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swapkit._native.lib import NULL, check, ffi, lib

if TYPE_CHECKING:
    from swapkit._native.pool import Pool

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStats:
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
        return LayoutStats(
            height_bytes=stats.height_bytes,
            places=stats.places,
            hits=stats.hits,
            hit_bytes=stats.hit_bytes,
            holes=stats.holes,
            hole_bytes=stats.hole_bytes,
            misses=stats.misses,
            missed_bytes=stats.missed_bytes,
            unplanned=stats.unplanned,
            unplanned_bytes=stats.unplanned_bytes,
        )
