"""What operators are given and make: their tensors and storages.

Most of it is no tree, so torch is not asked for the leaves of one.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from swapkit._runtime.runtime import get_runtime

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from torch.utils._pytree import TreeSpec

_storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined] # noqa: SLF001
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_STATISTICS_BYTES = 1 << 16  # the most that are copied: of so many channels
_TREES = (list, tuple, dict)
_ITSELF = -1
Form: TypeAlias = "Flat | TreeSpec"


class Flat(NamedTuple):
    """How leaves are the arguments of an operator: none of them in a tree but lists.

    `lengths`: of each argument, first those with no name, how many leaves it has; a leaf itself has
    `_ITSELF`. `names`: of the last ones.
    """

    lengths: tuple[int, ...]
    names: tuple[str, ...]

    def build(self, leaves: Sequence[Any]) -> Arguments:
        """Return the arguments that have these leaves."""
        rest = iter(leaves)
        values = [
            next(rest) if length == _ITSELF else list(islice(rest, length))
            for length in self.lengths
        ]
        count = len(values) - len(self.names)
        return tuple(values[:count]), dict(zip(self.names, values[count:], strict=True))


# Steps call operators in the same few ways over and over; the collector looks at each object.
_known = functools.lru_cache(maxsize=1024)(Flat)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Form]:
    """Return the leaves of an operator's arguments, and what `unflatten` needs besides."""
    leaves: list[Any] = []
    lengths = []
    for each in (*args, *kwargs.values()):
        if not isinstance(each, _TREES):
            leaves.append(each)
            lengths.append(_ITSELF)
        elif type(each) is list and not any(isinstance(leaf, _TREES) for leaf in each):
            leaves += each
            lengths.append(len(each))
        else:
            return tree_flatten((args, kwargs))
    return leaves, _known(tuple(lengths), tuple(kwargs))


def unflatten(leaves: Sequence[Any], form: Form) -> Arguments:
    """Return the arguments that have these leaves."""
    if isinstance(form, Flat):
        return form.build(leaves)
    arguments: Arguments = tree_unflatten(leaves, form)
    return arguments


def tensors_made(results: object) -> list[torch.Tensor]:
    """Return the tensors among what an operator returned."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, (list, tuple)) and not any(isinstance(each, _TREES) for each in results):
        leaves: Sequence[object] = results
    else:
        leaves = tree_leaves(results)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0: it has no plain memory."""
    if type(tensor) is torch.nn.Parameter:  # a kind of its own, with plain memory
        return _storage_id(tensor)
    return get_runtime().shim.storage_of(tensor)


def is_emptied(tensor: torch.Tensor) -> bool:
    """Return whether somebody has taken the memory of a tensor's storage away, as FSDP does."""
    if storage_of(tensor) or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except RuntimeError:
        return False  # a kind of tensor without one storage


def tensor_of(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return what is referred to, if it is there, so that it stays while Python holds it."""
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined] # noqa: SLF001
    return tensor


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


def claim(tensors: Sequence[torch.Tensor]) -> object:
    """Return what keeps the addresses of storages, though not their memory.

    For as long as it lives, what is known by such an address is not taken for another storage.
    """
    return get_runtime().shim.claim([each for each in tensors if storage_of(each)])
