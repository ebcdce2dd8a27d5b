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

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from swapkit._runtime.guards import hidden
from swapkit.ir.traces import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.recorder_storages import Storages

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STATES = (Kind.STATE, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
_WORD = 8  # bytes
# Words whose sums are taken apart: bytes that change places change the sums, unless they do so by a
# multiple of it. A prime, which no layout has for a stride.
_WIDTH = 1021
_SLOTS = 512  # checksums in one piece of memory
# Of a storage that views read apart, as the steps of a sequence: less of it is not looked at, since
# all of it would be, each time.
_LEAST_SHARE = 0.5
# Odd numbers with irregular bits.
_SPREAD, _MIX = -7046029254386353131, -4658895280553007687
_SHIFT = 29


class _Slot(NamedTuple):
    """Where a checksum is, or will be once the device has computed it."""

    device: torch.device
    number: int


class _Scratch:
    """Memory for the checksums that one thread computes in one stream."""

    def __init__(self, device: torch.device) -> None:
        count = 3 * _WIDTH + _WORD
        self.sums, self.weights = _memory(count, device), _memory(count, device)
        weights = torch.arange(1, count + 1, device=device).mul_(_SPREAD)
        weights = weights.bitwise_xor_(weights >> _SHIFT).mul_(_MIX)
        self.weights.copy_(weights.bitwise_xor_(weights >> _SHIFT).bitwise_or_(1))


class Checksums:
    """Checksums of storages, on the devices where these are. Any thread."""

    def __init__(self) -> None:
        """Begin without any."""
        self._lock = threading.Lock()
        self._tables: dict[torch.device, list[torch.Tensor]] = {}
        self._counts: dict[torch.device, int] = {}
        self._scratch: dict[object, _Scratch] = {}

    def take(self, tensor: torch.Tensor) -> _Slot | None:
        """Take one of all bytes of a tensor's storage as they are now; None: there is no room."""
        device = tensor.device
        try:
            # What is made here has to be usable outside of inference mode as well.
            with hidden(), torch.inference_mode(False):  # noqa: FBT003 - torch's
                scratch = self._scratch_for(device)
                slot, place = self._next(device)
                _sum(tensor.untyped_storage(), device, scratch, place)
        except torch.OutOfMemoryError:
            return None
        return slot

    def read(self) -> dict[_Slot | None, int]:
        """Wait for the devices; return the checksums, and let go of all memory."""
        with hidden():
            found: dict[_Slot | None, int] = {
                _Slot(device, _SLOTS * place + index): value
                for device, pieces in self._tables.items()
                for place, piece in enumerate(pieces)
                for index, value in enumerate(piece.tolist())
            }
        self._tables, self._scratch = {}, {}
        return found

    def _next(self, device: torch.device) -> tuple[_Slot, torch.Tensor]:
        with self._lock:
            pieces = self._tables.setdefault(device, [])
            index = self._counts.get(device, 0)
            piece, place = divmod(index, _SLOTS)
            if piece == len(pieces):
                pieces.append(_memory(_SLOTS, device))
            self._counts[device] = index + 1
            return _Slot(device, index), pieces[piece][place]

    def _scratch_for(self, device: torch.device) -> _Scratch:
        key: object = (threading.get_ident(), device)
        current_stream = getattr(getattr(torch, device.type, None), "current_stream", None)
        if device.type != "cpu" and current_stream is not None:
            key = (key, current_stream(device))
        scratch = self._scratch.get(key)
        if scratch is None:
            self._scratch[key] = scratch = _Scratch(device)
        return scratch


def _sum(
    storage: torch.UntypedStorage, device: torch.device, scratch: _Scratch, place: torch.Tensor
) -> None:
    """Put the checksum of a storage into a place: a sum of its words, each with its own weight.

    In integers, so that neither the order of additions counts nor what the bits mean. A change of
    all words by one number is not lost: weights and the number of rows are odd.
    """
    words, rest = divmod(storage.nbytes(), _WORD)
    bits = _bits(device, torch.int64).set_(storage, 0, (words,), (1,))
    sums, weights = scratch.sums, scratch.weights
    end = count = 0
    if words >= _WIDTH:
        rows = (words // _WIDTH - 1) | 1
        end, count = rows * _WIDTH, _WIDTH
        torch.sum(bits[:end].view(rows, _WIDTH), 0, out=sums[:count])
        sums[:count].mul_(weights[:count])
    first, count = count, count + words - end
    torch.mul(bits[end:], weights[first:count], out=sums[first:count])
    if rest:
        first, count = count, count + rest
        tail = _bits(device, torch.uint8).set_(storage, words * _WORD, (rest,), (1,))
        torch.mul(tail, weights[first:count], out=sums[first:count])
    torch.sum(sums[:count], 0, out=place)


def _memory(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for numbers; on the CPU none of the pool's, which is being measured."""
    if device.type == "cpu":
        return torch.frombuffer(bytearray(_WORD * count), dtype=torch.int64)
    return torch.zeros(count, dtype=torch.int64, device=device)


def _bits(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _Era:
    """A storage between two writes that were seen. `last`: its latest checksum.

    `rows`: operators that made or read it, with its checksum then.
    """

    __slots__ = ("is_saved", "is_used", "last", "rows")

    def __init__(self, last: _Slot | None) -> None:
        self.last = last
        self.rows: list[tuple[int, _Slot | None]] = []
        self.is_saved = self.is_used = False


# What an operator reads, with the checksums then.
Read: TypeAlias = "Sequence[tuple[_Era, _Slot | None]]"


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
        found: dict[int, tuple[_Era, _Slot | None]] = {}
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
        if era is not None and not era.is_saved and _is_plain(tensor):
            era.is_saved = True
            era.last = self._checksums.take(tensor)

    def used(self, number: int, tensor: torch.Tensor) -> None:
        """Look at what autograd is given back first."""
        era = self._eras.get(number)
        if era is not None and not era.is_used and _is_plain(tensor):
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
        if not _is_plain(tensor):
            return None
        with self._lock:
            number = self._storages.known(tensor)
            is_state = number is not None and self._storages.lives[number].kind in _STATES
        return None if is_state else number


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes of its own to look at."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    try:
        return storage.nbytes() > 0 and storage.data_ptr() != 0
    except RuntimeError:
        return False  # of a fake tensor, which functions of `torch.func` take the looks off


def _is_most(tensor: torch.Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= _LEAST_SHARE * tensor.untyped_storage().nbytes()
