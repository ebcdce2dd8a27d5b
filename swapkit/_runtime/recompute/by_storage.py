"""Objects by the storages that they are about."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST_STORAGES = 1 << 10
_Value = TypeVar("_Value")


class ByStorage(Generic[_Value]):
    """Objects that are referred to weakly, by the addresses of storages.

    Any thread may add and find; an object that goes takes itself out, on whichever thread that is.
    The lock is held for no call of anybody else's, and is one that a thread may take twice: a
    finalizer may run operators meanwhile. An object keeps the addresses from being used again.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._found: dict[int, weakref.WeakKeyDictionary[_Value, int]] = {}
        self._lock = threading.RLock()
        self._serials = itertools.count()
        self._most = LEAST_STORAGES  # storages, before those that nothing is about are forgotten

    def __len__(self) -> int:
        """Return the number of storages that are known."""
        return len(self._found)

    def add(self, value: _Value, storages: Iterable[int]) -> None:
        """Note which storages an object is about."""
        serial = next(self._serials)
        with self._lock:
            for storage in storages:
                self._found.setdefault(storage, weakref.WeakKeyDictionary())[value] = serial
            if len(self._found) > self._most:
                self._found = {key: each for key, each in self._found.items() if len(each) > 0}
                self._most = max(LEAST_STORAGES, 2 * len(self._found))

    def find(self, storages: Iterable[int]) -> list[_Value]:
        """Return the objects that are about some of these storages, the oldest first."""
        found: dict[_Value, int] = {}
        with self._lock:
            for storage in storages:
                found.update(self._found.get(storage, {}))
        return sorted(found, key=found.__getitem__)
