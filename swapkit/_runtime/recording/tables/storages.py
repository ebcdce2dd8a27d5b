"""The storages that a recorded step meets: their numbers, births and deaths.

The table finds a live storage by its address, whatever tensors view it. A weak reference reports
its death, on any device, fake tensors included. When a saved tensor is moved, its storage is freed
and its bytes come back in a new one: both share one number.
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

ALIVE = -2  # the `death` of a storage that still exists
_Tensor = torch.Tensor
_SEQUENCES = (list, tuple)


class StorageLife:
    """The record of one storage."""

    __slots__ = (
        *("birth", "death", "held", "index", "is_outside", "is_saved", "kind", "module", "nbytes"),
    )

    def __init__(self, nbytes: int, birth: int, kind: Kind) -> None:
        self.nbytes = nbytes
        self.birth = birth
        self.death = ALIVE
        self.kind = kind
        self.held = BEFORE  # the last operator during which more than the graph held it
        self.is_saved = False
        self.is_outside = False  # of the pool, but counted
        self.module = ""
        self.index = 0


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its number."""

    __slots__ = ("address", "nbytes", "number")
    address: int
    nbytes: int  # at the last observed write, or when it was met
    number: int

    def is_emptied(self) -> bool:
        """Return whether its owner has shrunk it since `nbytes` was noted, as FSDP does."""
        storage = self()
        if storage is None:
            return False
        fix_weak_storage(storage)  # else the storage may be freed while in use here
        return bool(storage.nbytes() < self.nbytes)


class Storages:
    """Numbers for storages. Callers hold the recorder's lock; deaths come at any time."""

    def __init__(
        self,
        device: torch.device,
        pool: DevicePool | None,
        now: Callable[[], int],
        *,
        counts_outside: bool = False,
    ) -> None:
        """Start empty.

        Args:
            device: of the step.
            pool: below torch on the device; None: not ours.
            now: returns the first operator that runs without a storage freed now.
            counts_outside: whether to count tensors that torch made before it had the pool, too.
        """
        self.lives: list[StorageLife] = []
        self._numbers: dict[int, int] = {}  # by the addresses of live storages
        self._watches: dict[int, _Watch] = {}  # by number
        self._device = device
        self._pool = pool
        self._counts_outside = counts_outside
        self._now: Callable[[], int] | None = now

    def known(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, if it has one."""
        try:
            return self._numbers.get(storage_id(tensor))
        except (NotImplementedError, RuntimeError):
            return None  # a sparse tensor has no storage of its own

    def number(self, tensor: torch.Tensor, birth: int, kind: Kind = Kind.ACTIVATION) -> int | None:
        """Return the number of a tensor's storage; add a new storage. None: it has no storage."""
        number = self.known(tensor)
        return self.add(tensor, birth, kind) if number is None else number

    def add(self, tensor: torch.Tensor, birth: int, kind: Kind = Kind.ACTIVATION) -> int | None:
        """Add a tensor's storage and return its number; None: it is not new, or there is none."""
        try:
            address = storage_id(tensor)
        except (NotImplementedError, RuntimeError):
            return None
        if address in self._numbers:
            return None
        number = len(self.lives)
        storage = tensor.untyped_storage()
        life = StorageLife(self._counted_bytes(storage, tensor.device), birth, kind)
        life.is_outside = self._counts_outside and not self._is_inside(storage, tensor.device)
        self.lives.append(life)
        self._watch(storage, address, number)
        return number

    def state(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Note the kind of a tensor's storage; a storage of kind STATE keeps its kind."""
        is_here = tensor.device.type == self._device.type
        number = self.number(tensor, BEFORE, kind) if is_here else self.known(tensor)
        if number is not None and self.lives[number].kind is not Kind.STATE:
            self.lives[number].kind = kind

    def move(self, number: int, tensor: torch.Tensor) -> None:
        """Note that a storage's bytes are now in a tensor's storage."""
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
        """Return the storages that were shrunk since they were last written to, or met."""
        watches = list(self._watches.values())
        found = tuple(sorted(each.number for each in watches if each.is_emptied()))
        for number in found:
            self._watches[number].nbytes = 0
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a budget would count a tensor's memory."""
        return self._is_counted(tensor.untyped_storage(), tensor.device)

    def stop(self) -> None:
        """Stop recording deaths."""
        self._now = None  # break the cycle with the owner
        self._watches.clear()
        self._numbers.clear()

    def _watch(self, storage: torch.UntypedStorage, address: int, number: int) -> None:
        watch = _Watch(storage, self._died)
        watch.address, watch.nbytes, watch.number = address, storage.nbytes(), number
        self._numbers[address] = number
        self._watches[number] = watch

    def _died(self, watch: _Watch) -> None:
        # Runs inside the code that drops the last reference, on any thread: must not block.
        now = self._now  # read once: another thread may call `stop`
        if now is None or self._watches.get(watch.number) is not watch:
            return
        self._watches.pop(watch.number, None)
        self._numbers.pop(watch.address, None)
        self.lives[watch.number].death = now()

    def _counted_bytes(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        return storage.nbytes() if self._is_counted(storage, device) else 0

    def _is_counted(self, storage: torch.UntypedStorage, device: torch.device) -> bool:
        """Return whether a budget counts the memory, or would with the pool below torch earlier."""
        if self._is_inside(storage, device):
            return True
        if not self._counts_outside or storage.device.type != self._device.type:
            return False
        return storage.resizable()  # other memory, as of numpy or a file, is never the pool's

    def _is_inside(self, storage: torch.UntypedStorage, device: torch.device) -> bool:
        """Return whether the memory is on the device and, if torch uses a pool, in that pool."""
        if device.type != self._device.type:
            return False
        if self._pool is None:
            return True
        if storage.device.type != device.type:
            return False  # a fake tensor's: it has no address, and `data_ptr` would warn
        try:
            return self._pool.owns(storage.data_ptr())
        except RuntimeError:
            return False  # a wrapper subclass has no memory of its own


def tensors_in(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Append the tensors among an operator's arguments or results to `found`."""
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif type(value) in _SEQUENCES:
            tensors_in(value, found)
