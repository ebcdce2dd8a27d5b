"""Addresses for known lifetimes: arrays in, offsets out. See `swapkit_layout.h` for the rules.

Arrays are objects with a buffer of the right type; this module does not use numpy. Calls release
the GIL, and several threads may use one object at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapkit._native.lib import NULL, check, ffi, lib

if TYPE_CHECKING:
    from swapkit._native._lib import CData

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

    def __init__(self, starts: Any, ends: Any, nbytes: Any, fixed: Any | None) -> None:
        """Take int64 arrays, one element for each item; they must not be resized later.

        Args:
            starts: when items begin to live.
            ends: when they no longer do.
            nbytes: their sizes.
            fixed: offsets of items that must not move, -1 for the others; None: all may move.

        Raises:
            InvalidArgument: an item that has no life or no bytes, or too many.
            OutOfHostMemory: no memory for the items.
        """
        buffers = [ffi.from_buffer("int64_t[]", each) for each in (starts, ends, nbytes)]
        at = ffi.from_buffer("int64_t[]", fixed) if fixed is not None else NULL
        self._buffers = (*buffers, at)
        self._items = ffi.new("sk_layout_items *", [len(buffers[0]), *self._buffers])
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
            InvalidArgument: more than `MOST_EXACT` items, or fixed ones.
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
