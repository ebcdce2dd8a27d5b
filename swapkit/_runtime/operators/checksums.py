"""Checksums of the bytes of storages, computed on the storages' device.

They detect swapped bytes and changed signs. A checksum needs almost no device memory.
"""

from __future__ import annotations

import threading
from array import array
from typing import NamedTuple

import torch

from swapkit._runtime.thread_state import tries_memory
from swapkit._runtime.torch_compat.internals import InferenceMode
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit._runtime.torch_compat.stream_delays import is_capturing

_WORD = 8  # bytes
# Number of separate column sums: words that swap places change the sums, unless their distance is a
# multiple of this width. It is a prime, which no layout uses as a stride.
_WIDTH = 1021
_SLOTS = 512  # checksums in one piece of memory
# The length of shifts, and odd factors with irregular bit patterns.
_NUMBERS = array("q", [29, -7046029254386353131, -4658895280553007687])


class ChecksumSlot(NamedTuple):
    """The place of a checksum, which the device may not have computed yet."""

    table: _ChecksumTable
    number: int


class _ChecksumTable:
    """The checksums that one thread computes in one stream, with their memory."""

    def __init__(self, device: torch.device) -> None:
        count = 3 * _WIDTH + _WORD
        self.device = device
        # Tensors: for a number, each operator would allocate one.
        self._shift, *self._factors = torch.frombuffer(_NUMBERS, dtype=torch.int64)
        self.sums, self._shifted, self.weights = (_memory(count, device) for _ in range(3))
        self.weights.copy_(torch.arange(1, count + 1, device=device))
        self.mix(self.weights)
        self.weights.bitwise_or_(1)
        self.place = _memory(1, device)[0]  # of a single checksum
        self._pieces: list[torch.Tensor] = []
        self._count = 0

    def next(self) -> tuple[ChecksumSlot, torch.Tensor]:
        """Return a new slot and its place in memory."""
        piece, place = divmod(self._count, _SLOTS)
        if piece == len(self._pieces):
            self._pieces.append(_memory(_SLOTS, self.device))
        self._count += 1
        return ChecksumSlot(self, self._count - 1), self._pieces[piece][place]

    def values(self) -> list[int]:
        """Wait for the device; return the checksums."""
        if self.device.type != "cpu":  # other streams than the current one computed
            torch.get_device_module(self.device).synchronize(self.device)
        return [value for piece in self._pieces for value in piece.tolist()][: self._count]

    def mix(self, words: torch.Tensor) -> None:
        """Spread each bit of a word over many of its bits, also the highest bit.

        In a plain sum, the sign bits of an even number of words would cancel.
        """
        shifted = self._shifted[: words.numel()]
        for factor in self._factors:
            torch.bitwise_right_shift(words, self._shift, out=shifted)
            words.bitwise_xor_(shifted).mul_(factor)
        torch.bitwise_right_shift(words, self._shift, out=shifted)
        words.bitwise_xor_(shifted)


class Checksums:
    """Checksums of storages, computed on their devices. Safe to use from any thread."""

    def __init__(self) -> None:
        """Create an empty set."""
        self._lock = threading.Lock()
        self._tables: dict[object, _ChecksumTable] | None = {}

    def take(self, tensor: torch.Tensor) -> ChecksumSlot | None:
        """Take a checksum of all bytes of a tensor's storage as they are now.

        None: there is no memory, the address is not aligned to words, a CUDA graph is being
        captured (which would capture these kernels), or the checksums were read already.
        """
        storage, device = tensor.untyped_storage(), tensor.device
        if device.type != "cpu" and (storage.data_ptr() % _WORD or is_capturing(device)):
            return None
        try:
            # Tensors made here must be usable outside inference mode, too.
            with hidden(), tries_memory(), InferenceMode(False):  # noqa: FBT003 - torch's
                table = self._table_for(device)
                if table is None:
                    return None
                slot, place = table.next()
                _sum(storage, storage.nbytes(), table, place)
        except torch.OutOfMemoryError:
            return None
        return slot

    def read(self) -> dict[ChecksumSlot | None, int]:
        """Wait for the devices; return the checksums, and free all memory."""
        with self._lock:
            tables, self._tables = self._tables or {}, None
        with hidden():
            return {
                ChecksumSlot(table, number): value
                for table in tables.values()
                for number, value in enumerate(table.values())
            }

    def _table_for(self, device: torch.device) -> _ChecksumTable | None:
        """Return this thread's table, a new one if necessary; None: checksums were read."""
        key: tuple[object, ...] = (threading.get_ident(), device)
        current_stream = getattr(getattr(torch, device.type, None), "current_stream", None)
        if device.type != "cpu" and current_stream is not None:
            key = (*key, current_stream(device))
        tables = self._tables
        table = None if tables is None else tables.get(key)
        if tables is None or table is not None:
            return table
        made = _ChecksumTable(device)
        with self._lock:
            tables[key] = made
            return None if self._tables is None else made


def _sum(
    storage: torch.UntypedStorage, nbytes: int, table: _ChecksumTable, place: torch.Tensor
) -> None:
    """Write a checksum of a storage's first bytes to `place`: the sum of words mixed with weights.

    The sum is of integers, so it depends neither on the order of additions nor on the dtype. Large
    storages are summed in columns first, with an odd number of rows: so adding one number to all
    words, or flipping all signs, changes the checksum.
    """
    words, rest = divmod(nbytes, _WORD)
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
    """Return memory for numbers; on the CPU not from the pool, which is being measured."""
    if device.type == "cpu":
        return torch.frombuffer(bytearray(_WORD * count), dtype=torch.int64)
    return torch.zeros(count, dtype=torch.int64, device=device)


def _bits(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class Digest:
    """A digest of a storage's bytes. Callers hold the runtime's lock."""

    __slots__ = ("_nbytes", "_table", "_value")

    def __init__(self, table: _ChecksumTable, nbytes: int, value: int) -> None:
        self._table = table
        self._nbytes = nbytes
        self._value = value

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the bytes of a storage have this digest."""
        return _digest(storage, self._nbytes, self._table) == self._value


class StorageDigests:
    """Takes digests of storages when memory is exhausted. Callers hold the runtime's lock."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the memory for all digests."""
        with hidden(), InferenceMode(False):  # noqa: FBT003 - torch's
            self._table = _ChecksumTable(device)

    def take(self, storage: torch.UntypedStorage, nbytes: int) -> Digest | None:
        """Return a digest of the first `nbytes`, after all streams have finished their work.

        None: the address is not aligned, a CUDA graph is being captured, or memory is exhausted.
        """
        device = self._table.device
        if device.type != "cpu" and (storage.data_ptr() % _WORD or is_capturing(device)):
            return None
        try:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            with tries_memory():
                return Digest(self._table, nbytes, _digest(storage, nbytes, self._table))
        except torch.OutOfMemoryError:
            return None


def _digest(storage: torch.UntypedStorage, nbytes: int, table: _ChecksumTable) -> int:
    with hidden(), InferenceMode(False):  # noqa: FBT003 - torch's
        _sum(storage, nbytes, table, table.place)
        return int(table.place)
