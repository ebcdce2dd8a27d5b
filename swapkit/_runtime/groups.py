"""Saved tensors and the storages under them.

A *handle* stands for one saved tensor in autograd's graph; its *group* stands for the storage, at
one version, that all saved views of it share: one host copy, one transfer, whatever the number of
views. The handle keeps an alias of the tensor (`detach()`: same storage, same version counter, not
the tensor itself, which would tie the graph into a cycle). When the storage is evicted the alias is
emptied in place and becomes a tracker without memory that still shares the version counter, so a
change in place is noticed in every state. When the storage is back the alias is filled again.

Nothing here locks: a group belongs to one swapper, which does.

Autograd owns the handles, handles own their group, and nothing else owns either: when a graph node
runs or a graph is dropped, device and host memory go with it.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit.errors import CorruptState, SavedTensorModified

if TYPE_CHECKING:
    from swapkit._runtime.transfers import HostBuffer, Transfer


class State(enum.Enum):
    """Where a group's bytes are."""

    RESIDENT = "resident"  # on the device only
    COPYING_OUT = "copying out"
    CLEAN = "clean"  # on the device, with a valid copy on the host
    OUT = "out"  # on the host only
    COPYING_IN = "copying in"


# A copy that fails, or an allocation that does, leads back. A group that was copied in keeps its
# host copy: it is clean, and evicting it again costs nothing.
_MOVES = {
    State.RESIDENT: {State.COPYING_OUT},
    State.COPYING_OUT: {State.CLEAN, State.RESIDENT},
    State.CLEAN: {State.OUT},
    State.OUT: {State.COPYING_IN},
    State.COPYING_IN: {State.CLEAN, State.OUT},
}


class View(NamedTuple):
    """How a tensor lies in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


class StorageGroup:
    """One storage at one version, with all saved tensors that view it."""

    __slots__ = (
        "__weakref__",
        "_handles",
        "device",
        "host",
        "key",
        "nbytes",
        "serial",
        "state",
        "storage",
        "tag",
        "transfer",
    )

    def __init__(self, storage: torch.UntypedStorage, version: int, tag: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.key = (storage._cdata, version)  # noqa: SLF001
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.tag = tag
        self.serial = 0  # the swapper's
        self.state = State.RESIDENT
        self.host: HostBuffer | None = None
        self.transfer: Transfer | None = None
        self._handles: list[weakref.ref[SavedTensor]] = []

    def move(self, state: State) -> None:
        """Change the state.

        Raises:
            CorruptState: the move is not one that a group can make.
        """
        if state not in _MOVES[self.state]:
            raise CorruptState(
                f"a storage group cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

    def add(self, handle: SavedTensor) -> None:
        """Let `handle` view this group."""
        self._handles.append(weakref.ref(handle))

    def handles(self) -> list[SavedTensor]:
        """Return the handles that are still alive."""
        alive = [handle for ref in self._handles if (handle := ref()) is not None]
        if len(alive) < len(self._handles):
            self._handles = [weakref.ref(handle) for handle in alive]
        return alive

    def is_exclusive(self) -> bool:
        """Return whether the storage can be dropped, and frees its memory then.

        Nobody else may hold it; and it must still have its size, which those who manage storages
        themselves (FSDP) change behind autograd's back.
        """
        if self.storage is None or self.storage.nbytes() != self.nbytes:
            return False
        holders = torch._C._storage_Use_Count(self.storage._cdata)  # noqa: SLF001
        if holders > 1 + len(self._handles):
            return False  # whichever of the handles live; a weight may have thousands
        return bool(holders == 1 + sum(not handle.is_stripped for handle in self.handles()))

    def strip(self) -> None:
        """Drop the storage from the group and all its handles; the host copy takes its place."""
        for handle in self.handles():
            handle.strip()
        self.storage = None

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Take a storage that holds the bytes again; handles are filled as they are needed."""
        self.storage = storage
        self.key = (storage._cdata, self.key[1])  # noqa: SLF001


class SavedTensor:
    """What autograd keeps instead of a saved tensor. Without a group it only checks the version."""

    __slots__ = ("__weakref__", "alias", "group", "version", "view")

    def __init__(self, tensor: torch.Tensor, group: StorageGroup | None = None) -> None:
        # A leaf that gathers gradients is held by its owner anyway, and who replaces its `.data`
        # means what is saved, too: as in plain autograd it is kept itself.
        is_own = group is None and tensor.is_leaf and tensor.requires_grad
        self.alias = tensor if is_own else tensor.detach()
        self.version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        self.group = group
        self.view: View | None = None
        if group is not None:
            group.add(self)

    @property
    def is_stripped(self) -> bool:
        """Whether the alias is only a tracker, without memory."""
        return self.view is not None

    def check_version(self, name: str) -> None:
        """Refuse a tensor that was changed in place after it was saved, as autograd does.

        Raises:
            SavedTensorModified: it was.
        """
        if self.alias.is_inference() or self.alias._version == self.version:  # noqa: SLF001
            return
        size = list(self.view.size if self.view is not None else self.alias.size())
        where = f", saved in {name}," if name else ""
        raise SavedTensorModified(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {self.alias.dtype} {size}{where} is at version {self.alias._version}; "  # noqa: SLF001
            f"expected version {self.version} instead."
        )

    def strip(self) -> None:
        """Let go of the storage; the alias stays as a tracker of the version."""
        if self.view is not None:
            return
        alias = self.alias
        self.view = View(
            alias.size(),
            alias.stride(),
            int(alias.storage_offset()),
            alias.is_conj(),
            alias.is_neg(),
        )
        alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)

    def fill(self, storage: torch.UntypedStorage) -> None:
        """View `storage` as the saved tensor did the one it was saved from."""
        if self.view is None:
            return
        size, stride, offset, is_conj, is_neg = self.view
        tensor = torch.empty(0, dtype=self.alias.dtype, device=self.alias.device)
        tensor.set_(storage, offset, size, stride)
        if is_conj:
            torch._C._set_conj(tensor, True)  # noqa: FBT003, SLF001
        if is_neg:
            torch._C._set_neg(tensor, True)  # noqa: FBT003, SLF001
        self.alias.data = tensor
        self.view = None
