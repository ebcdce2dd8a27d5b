"""Whether storages keep their bytes in a recorded step, but for what operators are seen to write.

A kernel that is no operator of torch (in Triton, of numpy, of a library) may write over a result,
and nothing counts that. An operator whose result was changed so would be computed again to its old
bytes, and one that read something that was changed afterwards would be from the new ones: neither
may be repeated. So checksums are taken of what an operator has just made, of what one is about to
read, and of what is saved and used. They stay on the device until the step has ended: nothing waits
for one, and none keeps what it is of.

Not looked at are parameters and buffers (recipes copy statistics), and operators that
run outside of modules, which no plan repeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from swapkit._runtime.operators.checksums import Checksums
from swapkit._runtime.torch_compat.plain_tensors import has_bytes
from swapkit.ir.traces import Kind

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import torch

    from swapkit._runtime.operators.checksums import ChecksumSlot
    from swapkit._runtime.recording.tables.storages import Storages

_STATES = (Kind.STATE, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
# Of a storage that views read apart, as the steps of a sequence: less of it is not looked at, since
# all of it would be, each time.
_LEAST_SHARE = 0.5


class _Era:
    """A storage between two writes that were seen. `last`: its latest checksum.

    `rows`: operators that made or read it, with its checksum then.
    """

    __slots__ = ("is_saved", "is_used", "last", "rows")

    def __init__(self, last: ChecksumSlot | None) -> None:
        self.last = last
        self.rows: list[tuple[int, ChecksumSlot | None]] = []
        self.is_saved = self.is_used = False


# What an operator reads, with the checksums then.
Read: TypeAlias = "Sequence[tuple[_Era, ChecksumSlot | None]]"


class Bytes:
    """The bytes of storages in one recorded step. Calls take the recorder's lock if they need it.

    Checksums are taken without it: the memory for them may have to be made by a rescue.
    """

    def __init__(self, storages: Storages, lock: threading.RLock, *, is_on: bool) -> None:
        """Know nothing. `is_on`: there is memory to look at."""
        self.is_on = is_on
        self.changed: frozenset[int] = frozenset()  # operators that cannot be repeated, at the end
        self._storages = storages
        self._lock = lock
        self._checksums = Checksums()
        self._eras: dict[int, _Era] = {}  # by the storage's number
        self._over: list[_Era] = []

    def before(self, given: Sequence[torch.Tensor]) -> Read:
        """Look at what an operator is about to read; `ran` takes what this returns."""
        found: dict[int, tuple[_Era, ChecksumSlot | None]] = {}
        for tensor in given:
            number = self._number(tensor)
            if number is None or number in found:
                continue
            era = self._eras.get(number)
            if era is None:
                era = self._eras[number] = _Era(self._checksums.take(tensor))
            elif _is_most(tensor):
                era.last = self._checksums.take(tensor)
            found[number] = era, era.last
        return list(found.values())

    def ran(
        self,
        row: int,
        read: Read,
        made: Sequence[torch.Tensor],
    ) -> None:
        """Note an operator that could be repeated, and look at what it has made."""
        for era, slot in read:
            era.rows.append((row, slot))
        for tensor in made:
            number = self._number(tensor)
            if number is not None and self._storages.lives[number].birth == row:
                self._eras[number] = era = _Era(self._checksums.take(tensor))
                era.rows.append((row, era.last))

    def written(self, number: int) -> None:
        """Note that an operator was seen to write to a storage. The lock is held."""
        era = self._eras.pop(number, None)
        if era is not None:
            self._over.append(era)

    def saved(self, number: int, tensor: torch.Tensor) -> None:
        """Look at what is saved; once is enough, since what is used is looked at as well."""
        era = self._eras.get(number)
        if era is not None and not era.is_saved and has_bytes(tensor):
            era.is_saved = True
            era.last = self._checksums.take(tensor)

    def used(self, number: int, tensor: torch.Tensor) -> None:
        """Look at what autograd is given back first."""
        era = self._eras.get(number)
        if era is not None and not era.is_used and has_bytes(tensor):
            era.is_used = True
            era.last = self._checksums.take(tensor)

    def stop(self) -> None:
        """Find the operators that cannot be repeated; the device has computed."""
        values = self._checksums.read()
        eras = [*self._over, *self._eras.values()]
        self._over, self._eras = [], {}
        self.changed = frozenset(
            row
            for era in eras
            for row, slot in era.rows
            if (value := values.get(slot)) is None or value != values.get(era.last)
        )

    def _number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a storage that is looked at; None: it is not."""
        if not has_bytes(tensor):
            return None
        with self._lock:
            number = self._storages.known(tensor)
            is_state = number is not None and self._storages.lives[number].kind in _STATES
        return None if is_state else number


def _is_most(tensor: torch.Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= _LEAST_SHARE * tensor.untyped_storage().nbytes()
