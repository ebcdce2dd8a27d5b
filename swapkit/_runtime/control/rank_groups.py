"""What a process has once for each default process group: in a new group all ranks start again."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
import torch.distributed

from swapkit._runtime.model.node_ranks import count_ranks
from swapkit._runtime.torch_compat.internals import default_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.torch_compat.internals import Store

_Found = TypeVar("_Found")
_Made_co = TypeVar("_Made_co", covariant=True)


class _Make(Protocol[_Made_co]):
    def __call__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> _Made_co: ...


class OnePerGroup(Generic[_Found]):
    """Finds the object of the default process group. Any thread."""

    def __init__(self, make: _Make[_Found]) -> None:
        """Make nothing yet.

        Args:
            make: takes what returns the group's store (ValueError: the group no longer exists),
                this rank, and the number of ranks. Called under a lock, so it must not wait.
        """
        self._make = make
        self._lock = threading.Lock()
        self._found: weakref.WeakKeyDictionary[object, _Found] = weakref.WeakKeyDictionary()

    def find(self) -> _Found | None:
        """Return the present group's object; None: there are no other ranks."""
        count = count_ranks()
        if count < 2:
            return None
        distributed = torch.distributed
        group = distributed.group.WORLD
        find_group = weakref.ref(group)

        def find_store() -> Store:
            if distributed.group.WORLD is not find_group():
                raise ValueError("the process group in which the session began no longer exists")
            store: Store = default_store()
            return store

        with self._lock:
            found = self._found.get(group)
            if found is None:
                found = self._make(find_store, rank=distributed.get_rank(), count=count)
                self._found[group] = found
            return found

    def all(self) -> list[_Found]:
        """Return the objects of all groups that still exist."""
        return list(self._found.values())
