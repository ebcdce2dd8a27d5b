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
from swapkit._runtime.recorder_delays import is_capturing
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

    table: _Table
    number: int


class _Table:
    """The checksums that one thread computes in one stream, and memory for that."""

    def __init__(self, device: torch.device) -> None:
        count = 3 * _WIDTH + _WORD
        self.device = device
        self.sums, self._shifted = _memory(count, device), _memory(count, device)
        self.weights = _memory(count, device)
        self.weights.copy_(torch.arange(1, count + 1, device=device))
        self.mix(self.weights)
        self.weights.bitwise_or_(1)
        self._pieces: list[torch.Tensor] = []
        self._count = 0

    def next(self) -> tuple[_Slot, torch.Tensor]:
        """Return a slot and its place."""
        piece, place = divmod(self._count, _SLOTS)
        if piece == len(self._pieces):
            self._pieces.append(_memory(_SLOTS, self.device))
        self._count += 1
        return _Slot(self, self._count - 1), self._pieces[piece][place]

    def values(self) -> list[int]:
        """Wait for the device; return the checksums."""
        if self.device.type != "cpu":  # others than the current stream have computed
            torch.get_device_module(self.device).synchronize(self.device)
        return [value for piece in self._pieces for value in piece.tolist()][: self._count]

    def mix(self, words: torch.Tensor) -> None:
        """Let each bit of a word change many of its bits, the highest one's too.

        In a plain sum the sign bits of an even number of words would cancel.
        """
        shifted = self._shifted[: words.numel()]
        for factor in (_SPREAD, _MIX):
            torch.bitwise_right_shift(words, _SHIFT, out=shifted)
            words.bitwise_xor_(shifted).mul_(factor)
        torch.bitwise_right_shift(words, _SHIFT, out=shifted)
        words.bitwise_xor_(shifted)


class Checksums:
    """Checksums of storages, on the devices where these are. Any thread."""

    def __init__(self) -> None:
        """Begin without any."""
        self._lock = threading.Lock()
        self._tables: dict[object, _Table] | None = {}

    def take(self, tensor: torch.Tensor) -> _Slot | None:
        """Take one of all bytes of a tensor's storage as they are now; None: that cannot be.

        There is no room, the memory lies as no word does, a graph is captured, whose kernels these
        would be, or all were read.
        """
        storage, device = tensor.untyped_storage(), tensor.device
        if device.type != "cpu" and (storage.data_ptr() % _WORD or is_capturing(device)):
            return None
        try:
            # What is made here has to be usable outside of inference mode as well.
            with hidden(), torch.inference_mode(False):  # noqa: FBT003 - torch's
                table = self._table_for(device)
                if table is None:
                    return None
                slot, place = table.next()
                _sum(storage, table, place)
        except torch.OutOfMemoryError:
            return None
        return slot

    def read(self) -> dict[_Slot | None, int]:
        """Wait for the devices; return the checksums, and let go of all memory."""
        with self._lock:
            tables, self._tables = self._tables or {}, None
        with hidden():
            return {
                _Slot(table, number): value
                for table in tables.values()
                for number, value in enumerate(table.values())
            }

    def _table_for(self, device: torch.device) -> _Table | None:
        """Return this thread's table, a new one's too; None: they were read."""
        key: tuple[object, ...] = (threading.get_ident(), device)
        current_stream = getattr(getattr(torch, device.type, None), "current_stream", None)
        if device.type != "cpu" and current_stream is not None:
            key = (*key, current_stream(device))
        tables = self._tables
        table = None if tables is None else tables.get(key)
        if tables is None or table is not None:
            return table
        made = _Table(device)
        with self._lock:
            tables[key] = made
            return None if self._tables is None else made


def _sum(storage: torch.UntypedStorage, table: _Table, place: torch.Tensor) -> None:
    """Put the checksum of a storage into a place: a sum of its words, each mixed with its place.

    In integers, so that neither the order of additions counts nor what the bits mean. Large ones
    are added up in columns first, of an odd number of rows: a change of all words by one number, or
    of all signs, is not lost.
    """
    words, rest = divmod(storage.nbytes(), _WORD)
    bits = _bits(table.device, torch.int64).set_(storage, 0, (words,), (1,))
    sums = table.sums
    end = count = 0
    if words >= _WIDTH:
        rows = (words // _WIDTH - 1) | 1
        end, count = rows * _WIDTH, _WIDTH
        torch.sum(bits[:end].view(rows, _WIDTH), 0, out=sums[:count])
    first, count = count, count + words - end
    sums[first:count].copy_(bits[end:])
    if rest:
        first, count = count, count + rest
        tail = _bits(table.device, torch.uint8).set_(storage, words * _WORD, (rest,), (1,))
        sums[first:count].copy_(tail)
    mixed = sums[:count].bitwise_xor_(table.weights[:count])
    table.mix(mixed)
    torch.sum(mixed, 0, out=place)


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
