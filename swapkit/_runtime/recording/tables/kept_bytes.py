"""Saved bytes of a recorded step: whether they change unseen, and how long forward holds them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from swapkit._native.sched import COPYING_OUT
from swapkit._runtime.operators.checksums import Checksums, ChecksumSlot
from swapkit._runtime.recording.tables.storages import StorageLife, Storages
from swapkit._runtime.torch_compat.internals import storage_id, storage_use_count
from swapkit._runtime.torch_compat.wrappers import has_bytes
from swapkit.ir.traces import Kind

if TYPE_CHECKING:
    import torch

# ---- kept bytes ----------------------------------------------------------------------------------
#
# Detection of storages whose bytes change in a recorded step without an operator that writes them.
#
# A kernel that is not a torch operator (Triton, numpy, a library) may overwrite a result, and no
# version counter shows it. Recomputing an operator would then restore the result's old bytes, or
# would read the new bytes of an operand: neither operator may be repeated. So the recorder takes
# checksums of each operator's results and operands, and of tensors that are saved and used. The
# checksums stay on the device until the step has ended: nothing waits for them, and they keep no
# tensor alive.
#
# Parameters and buffers are not checked (recipes copy statistics), nor are operators outside of
# modules, which no plan repeats.

_STATES = (Kind.STATE, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
# A view of a smaller share of its storage (a step of a sequence) takes no new checksum: a checksum
# always covers the whole storage.
_LEAST_SHARE = 0.5


class _Era:
    """A storage between two observed writes. `last`: its latest checksum.

    `rows`: the operators that made or read it, with its checksum at that time.
    """

    __slots__ = ("is_saved", "is_used", "last", "rows")

    def __init__(self, last: ChecksumSlot | None) -> None:
        self.last = last
        self.rows: list[tuple[int, ChecksumSlot | None]] = []
        self.is_saved = self.is_used = False


# The storages that an operator reads, with their checksums at that time.
Read: TypeAlias = "Sequence[tuple[_Era, ChecksumSlot | None]]"


class Bytes:
    """The bytes of storages in one recorded step. Methods take the recorder's lock where needed.

    Checksums are taken without the lock: their memory may need a rescue.
    """

    def __init__(self, storages: Storages, lock: threading.RLock, *, is_on: bool) -> None:
        """Start empty. `is_on`: tensors have memory."""
        self.is_on = is_on
        self.changed: frozenset[int] = frozenset()  # operators that cannot be repeated; by `stop`
        self._storages = storages
        self._lock = lock
        self._checksums = Checksums()
        self._eras: dict[int, _Era] = {}  # by the storage's number
        self._over: list[_Era] = []

    def before(self, given: Sequence[torch.Tensor]) -> Read:
        """Take checksums of an operator's operands; return them for `ran`."""
        found: dict[int, tuple[_Era, ChecksumSlot | None]] = {}
        for tensor in given:
            number = self._number(tensor)
            if number is None or number in found:
                continue
            era = self._eras.get(number)
            if era is None:
                era = self._eras[number] = _Era(self._take(tensor))
            elif _is_most(tensor):
                era.last = self._take(tensor)
            found[number] = era, era.last
        return list(found.values())

    def ran(
        self,
        row: int,
        read: Read,
        made: Sequence[torch.Tensor],
    ) -> None:
        """Note an operator that could be repeated, and take checksums of its results."""
        for era, slot in read:
            era.rows.append((row, slot))
        for tensor in made:
            number = self._number(tensor)
            if number is not None and self._storages.lives[number].birth == row:
                self._eras[number] = era = _Era(self._take(tensor))
                era.rows.append((row, era.last))

    def written(self, number: int) -> None:
        """Note an observed write to a storage. The lock is held."""
        era = self._eras.pop(number, None)
        if era is not None:
            self._over.append(era)

    def saved(self, number: int, tensor: torch.Tensor) -> None:
        """Take the checksum of a saved tensor; once is enough, since `used` checks, too."""
        era = self._eras.get(number)
        if era is not None and not era.is_saved and has_bytes(tensor):
            era.is_saved = True
            era.last = self._take(tensor)

    def used(self, number: int, tensor: torch.Tensor) -> None:
        """Take the checksum of a saved tensor on its first use in backward."""
        era = self._eras.get(number)
        if era is not None and not era.is_used and has_bytes(tensor):
            era.is_used = True
            era.last = self._take(tensor)

    def stop(self) -> None:
        """Find the operators that cannot be repeated, once the device has computed."""
        values = self._checksums.read()
        eras = [*self._over, *self._eras.values()]
        self.changed = frozenset(
            row
            for era in eras
            for row, slot in era.rows
            if (value := values.get(slot)) is None or value != values.get(era.last)
        )
        self._over, self._eras = [], {}

    def _take(self, tensor: torch.Tensor) -> ChecksumSlot | None:
        """Take a checksum; on the CPU its memory is not the pool's."""
        if tensor.device.type == "cpu":
            return self._checksums.take(tensor)
        with self._lock:
            self._storages.begin_ours()
        try:
            return self._checksums.take(tensor)
        finally:
            with self._lock:
                self._storages.end_ours()

    def _number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; None: it is not checked."""
        if not has_bytes(tensor):
            return None
        with self._lock:
            number = self._storages.known(tensor)
            is_state = number is not None and self._storages.lives[number].kind in _STATES
        return None if is_state else number


def _is_most(tensor: torch.Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= _LEAST_SHARE * tensor.untyped_storage().nbytes()


# ---- references ----------------------------------------------------------------------------------
#
# How long forward itself holds saved tensors: moving one earlier would free nothing.
#
# Python code that holds a saved tensor besides autograd's graph drops its reference when its
# function returns. That may be long after the last operator that reads the tensor. So before every
# operator, the recorder checks for each saved storage whether only the graph still holds it.

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

    def note_freed(self, operator: int) -> None:
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
