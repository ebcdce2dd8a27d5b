"""What swapping everything comes to, by a second implementation that shares no code with swapkit.

Each storage that autograd saves, at each version, is copied to the host where it is saved, and
brought back where it is needed, and both are waited for. Parameters, buffers and small storages
stay. The most memory in use under it is the predicted peak of swapping everything: nothing that
waits for backward is on the device, and no copy holds memory longer than it must.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST_BYTES = 1024


class Group:
    """One storage at one version: its copy on the host, and the latest one on the device."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.origin = weak_reference(storage)  # while it lives no other gets the same address
        self.device = storage.device
        pinned = storage.device.type == "cuda"
        self.host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        self.host.copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))
        self.restored: StorageWeakRef | None = None

    def fetch(self) -> torch.UntypedStorage:
        """Return the storage on the device; all views that are alive share one."""
        for known in (self.origin, self.restored):
            if known is not None:
                alive = torch.UntypedStorage._new_with_weak_ptr(known.cdata)  # noqa: SLF001
                if alive is not None:
                    return alive
        restored = torch.empty(self.host.nbytes, dtype=torch.uint8, device=self.device)
        restored.copy_(self.host)
        storage = restored.untyped_storage()
        self.restored = weak_reference(storage)
        return storage


class Saved(NamedTuple):
    """A saved tensor: its group and its view."""

    group: Group
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SwapReference(torch.autograd.graph.saved_tensors_hooks):
    """Swaps everything that is saved inside, at once."""

    def __init__(self, states: Iterable[torch.Tensor]) -> None:
        self._states = {address_of(state) for state in states}
        self._groups: weakref.WeakValueDictionary[tuple[int, int], Group] = (
            weakref.WeakValueDictionary()
        )
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or address_of(tensor) in self._states:
            return tensor
        key = (address_of(tensor), tensor._version)  # noqa: SLF001
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(storage)
        offset = int(tensor.storage_offset())
        return Saved(group, tensor.dtype, tensor.size(), tensor.stride(), offset)

    @staticmethod
    def _unpack(saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        storage = saved.group.fetch()
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return empty.set_(storage, saved.offset, saved.size, saved.stride)


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a reference that does not keep the storage's bytes."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage object."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address
