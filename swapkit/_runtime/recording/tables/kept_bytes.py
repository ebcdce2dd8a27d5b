"""Detection of storages whose bytes change in a recorded step without an operator that writes them.

A kernel that is not a torch operator (Triton, numpy, a library) may overwrite a result, and no
version counter shows it. Recomputing an operator would then restore the result's old bytes, or
would read the new bytes of an operand: neither operator may be repeated. So the recorder takes
checksums of each operator's results and operands, and of tensors that are saved and used. The
checksums stay on the device until the step has ended: nothing waits for them, and they keep no
tensor alive.

Parameters and buffers are not checked (recipes copy statistics), nor are operators outside of
modules, which no plan repeats.
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
