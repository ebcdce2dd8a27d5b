"""Until when forward holds what autograd saved: giving it up before would free nothing.

A saved tensor is dropped by those who hold it beside autograd's graph when their functions return,
which may be long after the last operator that reads it. So each is asked, before every operator,
whether only the graph has it left.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from swapkit._native.sched import COPYING_OUT
from swapkit._runtime.torch_compat.internals import storage_id, storage_use_count

if TYPE_CHECKING:
    from swapkit._runtime.recording.tables.storages import StorageLife

OURS = 1  # Python's object for a storage, by which the recorder knows it, holds it too
NOBODY = -1  # the last operator during which somebody held what nobody was seen to hold


class Holds:
    """The saved storages that others than a graph hold now. The recorder's lock is held."""

    def __init__(self, lives: list[StorageLife]) -> None:
        """Know of none. `lives` are those of all storages, by number."""
        self._lives = lives
        self._held: dict[int, list[weakref.ref[Any]]] = {}  # what stands for its saved tensors
        self._tasks: dict[int, int] = {}  # the backward passes that saved these, likewise

    def add(self, number: int, packed: object, task: int) -> None:
        """Note that a backward pass (NO_TASK: forward) saved a storage.

        `packed` stands for the saved tensor.
        """
        if self._lives[number].held == NOBODY:
            self._held.setdefault(number, []).append(weakref.ref(packed))
            self._tasks[number] = task

    def look(self, operator: int) -> None:
        """Note which storages nobody holds any more when an operator is about to run."""
        if not self._held:
            return
        for number, packs in list(self._held.items()):
            if not _is_held(packs) and not _is_copied(packs):
                del self._held[number], self._tasks[number]
                self._lives[number].held = operator - 1

    def finish(self, operator: int, task: int) -> None:
        """A backward pass runs an operator: what is still held is not the graph's to give up.

        But for what this pass has saved itself, with `create_graph`: a later one uses that.
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
    """Return whether others than what stands for saved tensors hold their storage."""
    alive = _alive(packs)
    if not alive:
        return False
    group = getattr(alive[0], "group", None)
    if group is not None:
        return bool(group.is_on_device and not group.is_exclusive)
    return bool(storage_use_count(storage_id(alive[0].alias)) > len(alive) + OURS)


def _is_copied(packs: list[weakref.ref[Any]]) -> bool:
    """Return whether a copy of a session is under way, which holds the storage as well."""
    alive = _alive(packs)
    group = getattr(alive[0], "group", None) if alive else None
    return group is not None and group.state == COPYING_OUT
