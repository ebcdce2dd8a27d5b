"""Objects by the storages that they are about."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

_Value = TypeVar("_Value")


class _Reference(weakref.ref[_Value]):
    """A weak reference to an object, with its number and what it is about."""

    __slots__ = ("serial", "storages")

    serial: int
    storages: tuple[int, ...]


class ByStorage(Generic[_Value]):
    """Objects that are referred to weakly, by the addresses of storages.

    Any thread may add and find; an object that goes takes itself out, on whichever thread that is.
    The lock is held for no call of anybody else's, and is one that a thread may take twice: a
    finalizer may run operators meanwhile. An object keeps the addresses from being used again.

    Steps add hundreds of objects. So there is one reference for each, and a tuple for each storage,
    which is replaced, not changed. Whatever makes a tuple may run the collector, so that an object
    goes on this very thread meanwhile: a tuple that was made of an outdated one is made again.

    A reference is no key: the hash is the object's, which a dead one does not have.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._found: dict[int, tuple[_Reference[_Value], ...]] = {}
        self._lock = threading.RLock()
        self._replaced = 0  # how many tuples were; the lock is held where that changes
        self._serials = itertools.count()
        self._on_loss = self._take_out

    def __len__(self) -> int:
        """Return the number of storages that are known."""
        return len(self._found)

    def add(self, value: _Value, storages: Iterable[int]) -> None:
        """Note which storages an object is about."""
        reference = _Reference(value, self._on_loss)
        reference.serial, reference.storages = next(self._serials), tuple(storages)
        with self._lock:
            for storage in reference.storages:
                self._replace(storage, reference)

    def find(self, storages: Iterable[int]) -> list[_Value]:
        """Return the objects that are about some of these storages, the oldest first."""
        with self._lock:
            found = {
                each.serial: value
                for storage in storages
                for each in self._found.get(storage, ())
                if (value := each()) is not None
            }
        return [found[serial] for serial in sorted(found)]

    def _take_out(self, reference: weakref.ref[_Value]) -> None:
        assert isinstance(reference, _Reference)
        with self._lock:
            for storage in reference.storages:
                self._replace(storage)

    def _replace(self, storage: int, added: _Reference[_Value] | None = None) -> None:
        """Add a reference, or take out those whose objects are gone; the lock is held."""
        while True:
            replaced = self._replaced
            known = self._found.get(storage, ())
            if added is not None:
                kept = (*known, added)
            else:
                kept = tuple([each for each in known if each() is not None])
            if replaced == self._replaced:  # from here on nothing can run in between
                break
        self._replaced += 1
        if kept:
            self._found[storage] = kept
        else:
            self._found.pop(storage, None)
