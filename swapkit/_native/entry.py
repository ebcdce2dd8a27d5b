"""The functions that torch's allocator calls, and the text of their failures."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from swapkit._native.backend import Handle
from swapkit._native.lib import NULL, check, ffi, lib
from swapkit._native.pool import Pool

if TYPE_CHECKING:
    from swapkit._native._lib import CData


class AllocatorEntry(Handle):
    """A pool behind the interface of torch's allocator."""

    _what = "entry"

    def __init__(self, pool: Pool) -> None:
        """Make an entry for `pool`, which must outlive it."""
        out = ffi.new("sk_entry **")
        check(lib.sk_entry_create(pool.pointer, out))
        super().__init__(out[0])
        self._context = ffi.new_handle(weakref.ref(self))
        self._explain: Callable[[int], str] | None = None

    def set_explain(self, explain: Callable[[int], str] | None) -> None:
        """Set the function that writes the text of a failed request; it gets the bytes."""
        self._explain = explain
        callback = NULL if explain is None else lib.sk_python_explain
        lib.sk_entry_set_explain(self.pointer, callback, self._context)

    def on_explain(self, nbytes: int) -> str:
        """Forward a native request for a text."""
        explain = self._explain
        return "" if explain is None else explain(nbytes)

    def _release(self, pointer: CData) -> None:
        lib.sk_entry_destroy(pointer)
