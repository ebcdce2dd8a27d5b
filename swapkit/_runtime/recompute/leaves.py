"""What operators are given and make: their tensors and storages.

Most of it is no tree, so torch is not asked for the leaves of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from swapkit._runtime.runtime import get_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils._pytree import TreeSpec

_storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined] # noqa: SLF001
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_STATISTICS_BYTES = 1 << 16  # the most that are copied: of so many channels
_TREES = (list, tuple, dict)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """Return the leaves of an operator's arguments, and what `unflatten` needs besides."""
    if kwargs or any(isinstance(each, _TREES) for each in args):
        return tree_flatten((args, kwargs))
    return list(args), None


def unflatten(leaves: Sequence[Any], spec: TreeSpec | None) -> Arguments:
    """Return the arguments that have these leaves."""
    if spec is None:
        return tuple(leaves), {}
    arguments: Arguments = tree_unflatten(leaves, spec)
    return arguments


def tensors_made(results: object) -> list[torch.Tensor]:
    """Return the tensors among what an operator returned."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0: it has no plain memory."""
    if type(tensor) is torch.nn.Parameter:  # a kind of its own, with plain memory
        return _storage_id(tensor)
    return get_runtime().shim.storage_of(tensor)


def copy_statistics(operand: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of what may be running statistics; None: it is none such.

    Torch counts no version of those, which a norm elsewhere may update meanwhile. They are numbers
    without gradients, one for each channel, in whatever shape an operator reads them.
    """
    if operand.requires_grad or not operand.is_floating_point() or not storage_of(operand):
        return None
    count = operand.numel()
    if count != max(operand.shape, default=1):
        return None
    if count * operand.element_size() > _STATISTICS_BYTES:
        return None
    copy = operand.detach().clone()
    # Strides may decide how an operator computes: those of an expanded tensor are not kept.
    return copy if copy.stride() == operand.stride() else None


def claim(tensors: Sequence[torch.Tensor]) -> list[StorageWeakRef]:
    """Return what keeps the addresses of storages, though not their memory.

    For as long as it lives, what is known by such an address is not taken for another storage.
    """
    storages = [each.untyped_storage() for each in tensors if storage_of(each)]
    return [StorageWeakRef(each) for each in storages]  # type: ignore[no-untyped-call]
