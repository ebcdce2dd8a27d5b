"""Properties of tensors in graphs, read without a change to any graph.

A view whose base was changed in place gets a new graph node when `grad_fn` or `is_leaf` is read.
Backward runs nodes in the order of their making, so gradients would be added up in another order
than without this read, and have other bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.torch_compat.internals import base_of, version_of

if TYPE_CHECKING:
    import torch


def graph_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return a tensor's `grad_fn`; that of its base if the tensor's own may be outdated."""
    base = _changed_base(tensor)
    return (tensor if base is None else base).grad_fn


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf, with or without gradients. Autograd saves it itself."""
    return not tensor.requires_grad or gathers_gradients(tensor)


def gathers_gradients(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf that requires gradients."""
    return tensor.requires_grad and _changed_base(tensor) is None and tensor.is_leaf


def _changed_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view's base that has a graph or gradient and may have changed since the view."""
    if not tensor.requires_grad:  # inference tensors, too, which have no version
        return None
    base = base_of(tensor)
    return base if base is not None and base.requires_grad and version_of(base) > 0 else None
