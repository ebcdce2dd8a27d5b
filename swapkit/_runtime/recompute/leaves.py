"""What operators are given and make: most of it no trees, which torch need not be asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils._pytree import TreeSpec

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
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
