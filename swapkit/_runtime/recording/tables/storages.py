"""The storages that a recorded step meets: their numbers, births and deaths.

The table finds a live storage by its address, whatever tensors view it. A weak reference reports
its death, on any device, fake tensors included. When a saved tensor is moved, its storage is freed
and its bytes come back in a new one: both share one number. When a storage loses its memory but
lives on, as those of FSDP's gathered weights do, its life ends: with new memory it is another
storage of the trace. The pool tells when (`blocks.py`), or, without one, calls of `resize_`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from swapkit._runtime.recording.tables.blocks import ALIVE, Blocks
from swapkit._runtime.saved.device import DevicePool
from swapkit._runtime.torch_compat import wrappers
from swapkit._runtime.torch_compat.internals import fix_weak_storage, storage_address, storage_id
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit._runtime.torch_compat.wrappers import address_of, tensors_inside
from swapkit.ir.traces import BEFORE, Kind

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

    __slots__ = ("address", "memory", "nbytes", "number")
    address: int
    memory: int  # the address of its memory in the pool; 0: it has none there
    nbytes: int  # at the last observed write, or when it was met
    number: int

    def is_emptied(self) -> bool:
        """Return whether it has shrunk since `nbytes` was noted, and nothing said so."""
        storage = self.storage()
        return storage is not None and bool(storage.nbytes() < self.nbytes)

    def storage(self) -> Any:  # noqa: ANN401 - an `UntypedStorage`
        """Return the storage; None: it has died."""
        storage = self()
        if storage is not None:
            fix_weak_storage(storage)  # else the storage may be freed while in use here
        return storage


class Storages:
    """Numbers for storages. Callers hold the recorder's lock; deaths come at any time."""

    def __init__(
        self,
        device: torch.device,
        pool: DevicePool | None,
        now: Callable[[], int],
        blocks: Blocks,
        read_pool: Callable[[], None],
        *,
        counts_outside: bool = False,
    ) -> None:
        """Start empty.

        Args:
            device: of the step.
            pool: below torch on the device; None: not ours.
            now: returns the first operator that runs without a storage freed now.
            blocks: the pool's.
            read_pool: brings them up to date.
            counts_outside: whether to count tensors that torch made before it had the pool, too.
        """
        self.lives: list[StorageLife] = []
        # Memory from before the step that no operator used and that went in the step.
        self.leftovers: set[int] = set()
        self._numbers: dict[int, int] = {}  # by the addresses of live storages
        self._watches: dict[int, _Watch] = {}  # by number
        # Storages that have lost their memory, by their addresses, and the kind of what they held.
        self._emptied: dict[int, tuple[_Watch, Kind]] = {}
        self._blocks = blocks
        self._read_pool: Callable[[], None] | None = read_pool
        self._device = device
        self._pool = pool
        self._counts_outside = counts_outside
        self.holds_weights = False  # whether weights may leave, which count all the time
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

    @unseen
    def add(self, tensor: torch.Tensor, birth: int, kind: Kind = Kind.ACTIVATION) -> int | None:
        """Add a tensor's storage and return its number; None: it is not new, or there is none."""
        try:
            address = storage_id(tensor)
        except (NotImplementedError, RuntimeError):
            return None
        if address in self._numbers:
            return None
        self.note_freed()
        number = len(self.lives)
        storage = tensor.untyped_storage()
        self._forget_dead(address)
        _, kind = self._emptied.pop(address, (None, kind))  # the same tensors' once more
        memory, nbytes = self._measure(tensor, storage)
        if (former := self._blocks.owner(memory)) is not None:
            if self._has_lost(former, memory):  # a compiled graph's memory moves when it is packed
                self.move(former, tensor)
                return former
            nbytes = 0  # lazily copied: the other one counts until the memory goes
        elif memory:
            taken = self._blocks.attach(memory, number)
            birth = birth if taken is None else taken
        life = StorageLife(nbytes, birth, kind)
        life.is_outside = self._counts_outside and not self._is_inside(storage, tensor.device)
        self.lives.append(life)
        self._watch(storage, address, number, memory)
        return number

    def _measure(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Return the address of a storage's memory in the pool, 0 if it has none, and its bytes."""
        if self.holds_weights and wrappers.may_leave(storage_address(storage)):
            return 0, storage.nbytes()  # a weight: counts all the time, wherever its bytes are
        memory = self._memory_inside(storage, tensor.device)
        return memory, self._counted_bytes(storage, tensor.device)

    @unseen
    def state(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Note the kind of a tensor's storage, or of those inside a wrapper.

        A storage of kind STATE keeps its kind.
        """
        for each in tensors_inside(tensor):
            self._state(each, kind)

    def _state(self, tensor: torch.Tensor, kind: Kind) -> None:
        is_here = tensor.device.type == self._device.type
        number = self.number(tensor, BEFORE, kind) if is_here else self.known(tensor)
        if number is not None and self.lives[number].kind is not Kind.STATE:
            self.lives[number].kind = kind

    def move(self, number: int, tensor: torch.Tensor) -> None:
        """Note that a storage's bytes are now in a tensor's storage."""
        if self.known(tensor) is None:
            self.note_freed()
            storage = tensor.untyped_storage()
            memory = self._memory_inside(storage, tensor.device)
            if memory:
                self._blocks.attach(memory, number)
            self.lives[number].death = ALIVE
            if (former := self._watches.get(number)) is not None:  # it lives, without its memory
                self._numbers.pop(former.address, None)
            self._watch(storage, storage_id(tensor), number, memory)

    def _has_lost(self, number: int, memory: int) -> bool:
        """Return whether a storage has no memory at this address any more."""
        watch = self._watches.get(number)
        storage = None if watch is None else watch.storage()
        return storage is None or address_of(storage) != memory

    def written(self, tensor: torch.Tensor, operator: int) -> int | None:
        """Return the number of the storage that an operator wrote; it may have got new memory."""
        number = self.known(tensor)
        watch = None if number is None else self._watches.get(number)
        if number is None or watch is None:
            return self.add(tensor, operator)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        had_none = watch.nbytes == 0 < nbytes
        if had_none or (watch.memory and address_of(storage) != watch.memory):
            self._end(watch, operator if had_none else operator + 1)
            return self.add(tensor, operator)
        counted = self._counted_bytes(storage, tensor.device)
        self.lives[number].nbytes = max(self.lives[number].nbytes, counted)
        watch.nbytes = nbytes
        return number

    def note_freed(self) -> None:
        """End the lives of storages whose memory has gone back to the pool."""
        if self._read_pool is None:
            return
        self._read_pool()
        for given in self._blocks.pop_given():
            watch = self._watches.get(given.number)
            storage = None if watch is None else watch.storage()
            if watch is None or storage is None:  # others may have held its memory longer
                self.lives[given.number].death = given.death
            elif watch.memory != given.address:
                pass  # a session has moved its bytes
            elif address_of(storage) == given.address:  # given back, and taken again at once
                self._blocks.attach(given.address, given.number)
            else:
                self._end(watch, given.death)

    def begin_ours(self) -> None:
        """Note that the memory taken from now on is the recorder's own."""
        self.note_freed()
        self._blocks.are_ours = True

    def end_ours(self) -> None:
        """Note that it no longer is."""
        self.note_freed()
        self._blocks.are_ours = False

    def end_emptied(self) -> None:
        """End the lives of storages that have shrunk, where neither a pool nor `resized` says so.

        Compiled code and C++ call no method of Python.
        """
        for watch in list(self._watches.values()):
            if watch.is_emptied() and self._now is not None:
                self._end(watch, self._now())

    def resized(self, storage: torch.UntypedStorage, former_bytes: int, *, is_here: bool) -> None:
        """Note that a storage has other memory now: that is another storage of the trace.

        `is_here`: whether a recorded thread did it; else only storages of the trace count.
        """
        address, now = storage_address(storage), self._now
        if now is None:
            return
        number = self._numbers.get(address)
        self._forget_dead(address)
        if number is None and address not in self._emptied:
            # Fake tensors have storages on `meta`, whatever their device.
            if not is_here or storage.device.type not in {self._device.type, "meta"}:
                return
            kind = Kind.INPUT if former_bytes else Kind.ACTIVATION
            number = self._start(storage, former_bytes, BEFORE, kind)
        if number is not None:
            self._end(self._watches[number], now())
            if self.lives[number].birth == now():  # no operator ran meanwhile
                self.lives[number].nbytes = 0
        if storage.nbytes() > 0:
            _, kind = self._emptied.pop(address)
            self._start(storage, storage.nbytes(), now(), kind)

    def _start(self, storage: torch.UntypedStorage, nbytes: int, birth: int, kind: Kind) -> int:
        """Add a storage without memory in the pool; return its number."""
        number = len(self.lives)
        self.lives.append(StorageLife(nbytes, birth, kind))
        self._watch(storage, storage_address(storage), number, 0)
        return number

    def _end(self, watch: _Watch, death: int) -> None:
        """End the life of a storage that has lost its memory."""
        life = self.lives[watch.number]
        life.death = death
        self._watches.pop(watch.number, None)
        self._numbers.pop(watch.address, None)
        self._emptied[watch.address] = watch, life.kind

    def _forget_dead(self, address: int) -> None:
        """Forget an emptied storage that has died: another one may have its address now."""
        if address in self._emptied and self._emptied[address][0].storage() is None:
            del self._emptied[address]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a budget would count a tensor's memory."""
        return self._is_counted(tensor.untyped_storage(), tensor.device)

    def stop(self) -> None:
        """Stop recording deaths; add the memory that no storage was seen to have."""
        if self._now is None:
            return
        self._now = self._read_pool = None  # break the cycle with the owner
        for block in self._blocks.unowned():
            life = StorageLife(block.nbytes, block.birth, Kind.ACTIVATION)
            life.death = block.death
            if block.birth == BEFORE:
                self.leftovers.add(len(self.lives))
            self.lives.append(life)
        self._blocks.stop()
        self._watches.clear()
        self._numbers.clear()
        self._emptied.clear()

    def _watch(self, storage: torch.UntypedStorage, address: int, number: int, memory: int) -> None:
        watch = _Watch(storage, self._died)
        watch.address, watch.nbytes, watch.number = address, storage.nbytes(), number
        watch.memory = memory
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
        if self._pool is None:
            return device.type == self._device.type
        return self._memory_inside(storage, device) != 0

    def _memory_inside(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        """Return the address of a storage's memory in the pool; 0: it has none there."""
        if self._pool is None or not device.type == storage.device.type == self._device.type:
            return 0  # the storage of a fake tensor has no address, and `data_ptr` would warn
        address = address_of(storage)
        return address if self._pool.owns(address) else 0


def tensors_in(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Append the tensors among an operator's arguments or results to `found`."""
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif type(value) in _SEQUENCES:
            tensors_in(value, found)
