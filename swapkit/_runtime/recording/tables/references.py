"""How long forward itself holds saved tensors: moving one earlier would free nothing.

Python code that holds a saved tensor besides autograd's graph drops its reference when its function
returns. That may be long after the last operator that reads the tensor. So before every operator,
the recorder checks for each saved storage whether only the graph still holds it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from swapkit._native.sched import COPYING_OUT
from swapkit._runtime.torch_compat.internals import storage_id, storage_use_count

if TYPE_CHECKING:
    from swapkit._runtime.recording.tables.storages import StorageLife

OURS = 1  # the reference of the storage's Python object, through which the recorder watches it
NOBODY = -1  # `held` of a storage that nothing but the graph was seen to hold


class Holds:
    """The saved storages that more than a graph holds now. Callers hold the recorder's lock."""

    def __init__(self, lives: list[StorageLife]) -> None:
        """Start empty. `lives`: the lives of all storages, by number."""
        self._lives = lives
        self._held: dict[int, list[weakref.ref[Any]]] = {}  # by storage: its packed tensors
        self._tasks: dict[int, int] = {}  # by storage: the backward pass that saved it

    def add(self, number: int, packed: object, task: int) -> None:
        """Note that a backward pass (NO_TASK: forward) saved a storage.

        `packed`: the object that the graph keeps in place of the tensor.
        """
        if self._lives[number].held == NOBODY:
            self._held.setdefault(number, []).append(weakref.ref(packed))
            self._tasks[number] = task

    def look(self, operator: int) -> None:
        """Note which storages only the graph still holds, before an operator runs."""
        if not self._held:
            return
        for number, packs in list(self._held.items()):
            if not _is_held(packs) and not _is_copied(packs):
                del self._held[number], self._tasks[number]
                self._lives[number].held = operator - 1

    def finish(self, operator: int, task: int) -> None:
        """Rule out moving the storages that are still held when a backward pass runs an operator.

        Storages that this pass saved itself (with `create_graph`) stay: a later pass uses them.
        """
        for number, packs in list(self._held.items()):
            if self._tasks[number] == task:
                continue
            if _is_copied(packs):
                self._lives[number].held = operator - 1
            else:
                self._lives[number].is_saved = False
            del self._held[number], self._tasks[number]


def _alive(packs: list[weakref.ref[Any]]) -> list[Any]:
    return [packed for reference in packs if (packed := reference()) is not None]


def _is_held(packs: list[weakref.ref[Any]]) -> bool:
    """Return whether anything but the packed saved tensors holds their storage."""
    alive = _alive(packs)
    if not alive:
        return False
    group = getattr(alive[0], "group", None)
    if group is not None:
        return bool(group.is_on_device and not group.is_exclusive)
    return bool(storage_use_count(storage_id(alive[0].alias)) > len(alive) + OURS)


def _is_copied(packs: list[weakref.ref[Any]]) -> bool:
    """Return whether a session is copying the storage out; the copy holds the storage, too."""
    alive = _alive(packs)
    group = getattr(alive[0], "group", None) if alive else None
    return group is not None and group.state == COPYING_OUT
