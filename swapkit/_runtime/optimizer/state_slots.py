"""The places of optimizer states, and copies of whole storages on the host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from swapkit._native.sched import CLEAN, COPYING_IN, COPYING_OUT, OUT, RESIDENT, Group, Scheduler
from swapkit._runtime.saved.device import Device
from swapkit._runtime.shim.library import Shim
from swapkit._runtime.torch_compat.internals import get_shard, set_shard, storage_address
from swapkit.ir.plans import Tier

# ---- state slots ---------------------------------------------------------------------------------
#
# The places of optimizer states: entries of a parameter's states, and local shards of DTensors.
#
# The local shard of a DTensor is a plain tensor. A move replaces it inside the DTensor: the object,
# its mesh and its placements stay, so references to the DTensor stay valid. While the shard is on
# the host, the DTensor still reports the device of its mesh, as under FSDP2's `CPUOffloadPolicy`.

NESTED = 3  # depth of nested containers that are searched for states


class StateSlot(NamedTuple):
    """A state tensor's place: a key of a dict or an index of a list."""

    container: Any
    key: Any

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor in the slot."""
        tensor: torch.Tensor = self.container[self.key]
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the slot still holds this tensor object."""
        try:
            return self.container[self.key] is tensor
        except (KeyError, IndexError):
            return False

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the slot."""
        self.container[self.key] = tensor

    def is_referenced(self) -> bool:
        """Return whether other Python code references the tensor object."""
        return _count_references(self) > _OWN_REFERENCES


class ShardSlot(NamedTuple):
    """The place of a DTensor's local shard."""

    whole: StateSlot  # the DTensor's own slot

    @property
    def tensor(self) -> torch.Tensor:
        """The local shard."""
        return get_shard(self.whole.tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the shard is still this tensor object."""
        try:
            whole = self.whole.tensor
        except (KeyError, IndexError):
            return False
        return is_sharded(whole) and get_shard(whole) is tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the shard; the DTensor stays the same object."""
        set_shard(self.whole.tensor, tensor)

    def is_referenced(self) -> bool:
        """Return whether other Python code references the DTensor or its shard."""
        return self.whole.is_referenced() or _count_shard_references(self) > _OWN_SHARD_REFERENCES


Slot: TypeAlias = StateSlot | ShardSlot


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor. Imports nothing: without its module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, and any other tensor as it is."""
    return get_shard(tensor) if is_sharded(tensor) else tensor


def find_slots(state: object) -> list[Slot]:
    """Return the slots of all tensors in one parameter's states."""
    return list(_find(state, NESTED)) if isinstance(state, dict) else []


def _find(container: Any, depth: int) -> Iterator[Slot]:  # noqa: ANN401 - a dict or a list
    # LBFGS has lists; others have dicts in dicts. The items of a tuple could not be replaced.
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        value = container[key]
        if isinstance(value, torch.Tensor):
            slot = StateSlot(container, key)
            yield ShardSlot(slot) if is_sharded(value) else slot
        elif depth and isinstance(value, (dict, list)):
            yield from _find(value, depth - 1)


def _count_references(slot: StateSlot) -> int:
    return sys.getrefcount(slot.container[slot.key])


def _count_shard_references(slot: ShardSlot) -> int:
    return sys.getrefcount(get_shard(slot.whole.container[slot.whole.key]))


class _WholeLike:
    """Has a shard in the way of a DTensor."""

    def __init__(self) -> None:
        set_shard(self, object())


# The counts for an object that only its container or DTensor references.
_OWN_REFERENCES = _count_references(StateSlot([object()], 0))
_OWN_SHARD_REFERENCES = _count_shard_references(ShardSlot(StateSlot([_WholeLike()], 0)))

# ---- host copies ---------------------------------------------------------------------------------
#
# Copies of whole storages on the host, readable there: for optimizer states.
#
# They use the scheduler of saved tensors, and host memory that is never written to the disk.

# A group's states before a transfer out, and before one in.
_NOT_STARTED = (RESIDENT, OUT)


class Start(Protocol):
    """`Group.copy_out` or `Group.copy_in`."""

    def __call__(self, device: int, *, owner: int, next_use: int, producer: int) -> None:
        """Queue the copy."""


def start_copy(
    shim: Shim,
    group: Group,
    start: Start,
    storage: torch.UntypedStorage,
    *,
    next_use: int,
    producer: int,
) -> None:
    """Queue a copy from or to a storage, which the copy holds until it is done.

    Args:
        shim: makes the owner of the copy.
        group: the group to copy.
        start: its `copy_out` or `copy_in`.
        storage: the memory on the device, of the group's size.
        next_use: the place in the queue; 0: ahead of all tensors saved for backward.
        producer: the stream to wait for.
    """
    owner = 0
    try:
        owner = shim.new_owner(storage_address(storage))
        start(storage.data_ptr(), owner=owner, next_use=next_use, producer=producer)
    except BaseException:
        # In any other state, the copy is running and holds the owner.
        if owner and group.state_at[0] in _NOT_STARTED:
            shim.drop_owner(owner)
        raise


class HostBuffer:
    """Host memory with the bytes of a storage; released with the object."""

    __slots__ = ("_group", "address", "nbytes")

    def __init__(self, group: Group) -> None:
        self._group = group
        self.address = 0  # set once the bytes have arrived
        self.nbytes = group.nbytes

    def lend(self) -> Group:
        """Return the group, ready to be copied back; finish an earlier copy back first."""
        if self._group.state == COPYING_IN:
            self._group.finish_in()
        if self._group.state == CLEAN:
            self._group.evict()
        return self._group


class HostCopy:
    """One copy of one storage; keeps both ends alive until the copy is done."""

    __slots__ = ("_group", "_shim", "_stream", "host")

    def __init__(self, group: Group, host: HostBuffer, stream: int, shim: Shim) -> None:
        self._group = group
        self._shim = shim
        self._stream = stream  # which may use the device's end again after the copy
        self.host = host

    def wait(self) -> None:
        """Wait until the copy is done.

        Raises:
            SwapkitError: the copy failed.
        """
        if self._group.state == COPYING_OUT:
            self._group.finish_out(self._stream)
            self.host.address = self._group.host_address
        elif self._group.state == COPYING_IN:
            self._shim.in_range("swap_in_wait", lambda: self._group.finish_in(self._stream))


class HostCopies:
    """Copies a device's storages to the host and back. Safe to use from any thread."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        self._scheduler = scheduler
        self._device = device
        self._shim = device.shared.shim

    def copy_out(self, storage: torch.UntypedStorage) -> HostCopy:
        """Start copying a storage to the host.

        Raises:
            OutOfHostMemory: too little host memory is free.
        """
        group = Group(self._scheduler, storage.nbytes(), Tier.HOST)
        start = functools.partial(self._start, group, group.copy_out, storage)
        stream = self._shim.in_range("swap_out", start)
        return HostCopy(group, HostBuffer(group), stream, self._shim)

    def copy_in(self, host: HostBuffer, storage: torch.UntypedStorage) -> HostCopy:
        """Start copying host memory into a storage of the same size."""
        group = host.lend()
        start = functools.partial(self._start, group, group.copy_in, storage)
        stream = self._shim.in_range("swap_in", start)
        return HostCopy(group, host, stream, self._shim)

    def _start(self, group: Group, start: Start, storage: torch.UntypedStorage) -> int:
        """Start a transfer, which holds the storage until it is done; return its stream."""
        stream = self._device.current_stream()
        start_copy(self._shim, group, start, storage, next_use=0, producer=stream)
        return stream
