"""The places of optimizer states: entries of a parameter's states, and local shards of DTensors.

The local shard of a DTensor is a plain tensor. A move replaces it inside the DTensor: the object,
its mesh and its placements stay, so references to the DTensor stay valid. While the shard is on the
host, the DTensor still reports the device of its mesh, as under FSDP2's `CPUOffloadPolicy`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from swapkit._runtime.torch_compat.internals import get_shard, set_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

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
