"""The storages that a recorded step meets: numbers for them, their births and their deaths.

A storage is known by its address while it lives, whatever tensors view it. A weak reference to it
tells when it goes, on any device, fake ones included. Where saved tensors are moved a storage goes
and its bytes come back in another one: both have one number.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.torch_compat.internals import fix_weak_storage, storage_id
from swapkit.ir.traces import BEFORE, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swapkit._runtime.saved.device import DevicePool

ALIVE = -2  # the death of what is still there
_Tensor = torch.Tensor
_SEQUENCES = (list, tuple)


class StorageLife:
    """What is known of one storage."""

    __slots__ = ("birth", "death", "held", "index", "is_saved", "kind", "module", "nbytes")

    def __init__(self, nbytes: int, birth: int, kind: Kind) -> None:
        self.nbytes = nbytes
        self.birth = birth
        self.death = ALIVE
        self.kind = kind
        self.held = BEFORE  # until this operator, by others than a graph that saved it
        self.is_saved = False
        self.module = ""
        self.index = 0


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its number."""

    __slots__ = ("address", "nbytes", "number")
    address: int
    nbytes: int  # when an operator was last seen to write to it, or it was met
    number: int

    def is_emptied(self) -> bool:
        """Return whether its owner has taken memory away since, as FSDP does."""
        storage = self()
        if storage is None:
            return False
        fix_weak_storage(storage)  # or it goes with this reference
        return bool(storage.nbytes() < self.nbytes)


class Storages:
    """Numbers for storages. What calls it holds the recorder's lock; deaths come at any time."""

    def __init__(
        self, device: torch.device, pool: DevicePool | None, now: Callable[[], int]
    ) -> None:
        """Begin without any. `now` returns the first operator that would run without a storage."""
        self.lives: list[StorageLife] = []
        self._numbers: dict[int, int] = {}  # by the addresses of those that are there
        self._watches: dict[int, _Watch] = {}  # by number
        self._device = device
        self._pool = pool
        self._now: Callable[[], int] | None = now

    def known(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, if it has one."""
        try:
            return self._numbers.get(storage_id(tensor))
        except (NotImplementedError, RuntimeError):
            return None  # a sparse one has no storage of its own

    def number(self, tensor: torch.Tensor, birth: int, kind: Kind = Kind.ACTIVATION) -> int | None:
        """Return the number of a tensor's storage, a new one's too; None: it has no storage."""
        number = self.known(tensor)
        return self.add(tensor, birth, kind) if number is None else number

    def add(self, tensor: torch.Tensor, birth: int, kind: Kind = Kind.ACTIVATION) -> int | None:
        """Return the number of a tensor's storage if that is new; None: it is not, or is none."""
        try:
            address = storage_id(tensor)
        except (NotImplementedError, RuntimeError):
            return None
        if address in self._numbers:
            return None
        number = len(self.lives)
        storage = tensor.untyped_storage()
        self.lives.append(StorageLife(self._counted_bytes(storage, tensor.device), birth, kind))
        self._watch(storage, address, number)
        return number

    def state(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Note that a tensor of the device is of some kind; a parameter's stays a parameter's."""
        is_here = tensor.device.type == self._device.type
        number = self.number(tensor, BEFORE, kind) if is_here else self.known(tensor)
        if number is not None and self.lives[number].kind is not Kind.STATE:
            self.lives[number].kind = kind

    def move(self, number: int, tensor: torch.Tensor) -> None:
        """Note that a storage's bytes are in a tensor's storage now."""
        if self.known(tensor) is None:
            self.lives[number].death = ALIVE
            self._watch(tensor.untyped_storage(), storage_id(tensor), number)

    def resize(self, number: int, tensor: torch.Tensor) -> None:
        """Note that a tensor's storage may have grown."""
        storage = tensor.untyped_storage()
        nbytes = self._counted_bytes(storage, tensor.device)
        self.lives[number].nbytes = max(self.lives[number].nbytes, nbytes)
        if number in self._watches:
            self._watches[number].nbytes = storage.nbytes()

    def emptied(self) -> tuple[int, ...]:
        """Return the storages whose memory was taken away since they were written to, or met."""
        watches = list(self._watches.values())
        found = tuple(sorted(each.number for each in watches if each.is_emptied()))
        for number in found:
            self._watches[number].nbytes = 0
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is what a budget would count."""
        return self._is_counted(tensor.untyped_storage(), tensor.device)

    def stop(self) -> None:
        """Note no more deaths."""
        self._now = None  # who has this
        self._watches.clear()
        self._numbers.clear()

    def _watch(self, storage: torch.UntypedStorage, address: int, number: int) -> None:
        watch = _Watch(storage, self._died)
        watch.address, watch.nbytes, watch.number = address, storage.nbytes(), number
        self._numbers[address] = number
        self._watches[number] = watch

    def _died(self, watch: _Watch) -> None:
        # In the middle of whatever lets go of it, on any thread: nothing here may wait.
        now = self._now  # once: another thread may stop this
        if now is None or self._watches.get(watch.number) is not watch:
            return
        self._watches.pop(watch.number, None)
        self._numbers.pop(watch.address, None)
        self.lives[watch.number].death = now()

    def _counted_bytes(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        return storage.nbytes() if self._is_counted(storage, device) else 0

    def _is_counted(self, storage: torch.UntypedStorage, device: torch.device) -> bool:
        """Whether it is the device's memory and, where a pool is below torch, the pool's."""
        if device.type != self._device.type:
            return False
        if self._pool is None:
            return True
        if storage.device.type != device.type:
            return False  # a fake tensor's: it has no address, and torch warns who asks
        try:
            return self._pool.owns(storage.data_ptr())
        except RuntimeError:
            return False  # of a tensor that is made of others, and has no memory itself


def tensors_in(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Add the tensors among an operator's arguments or results to a list."""
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif type(value) in _SEQUENCES:
            tensors_in(value, found)
