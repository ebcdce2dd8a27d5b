"""Weights that a function written in Python saves for its backward: it gets them back themselves.

Under saved-tensor hooks, whatever they return, torch makes a new tensor for a saved leaf that
requires grad. The new tensor has the leaf's memory and gradient accumulator, but neither its
identity nor its attributes (`weight.main_grad`), which functions of large-model libraries read.
Torch returns leaves without gradients as the hooks return them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from swapkit._runtime.torch_compat.internals import innermost_transform
from swapkit._runtime.torch_compat.isolation import hidden, untraced

_NODE: Any = BackwardCFunction
_plain = _NODE.saved_tensors


@untraced
def _saved_tensors(node: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - of any class
    """Return a node's saved tensors. Backward calls this on its thread; no lock is held."""
    found: tuple[torch.Tensor, ...] = _plain.__get__(node)  # None: not a tensor
    return tuple(_itself(each) if _is_copy(each) else each for each in found)


def _is_copy(tensor: torch.Tensor | None) -> bool:
    """Return whether a saved tensor is a leaf that requires grad, and may be a new tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.requires_grad
        and tensor.grad_fn is None
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and innermost_transform() is None
    )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the leaf whose gradient accumulator a saved tensor has."""
    with hidden(), torch.enable_grad():
        node = tensor.view_as(tensor).grad_fn
    accumulator = None if node is None else node.next_functions[0][0]
    leaf: torch.Tensor = getattr(accumulator, "variable", tensor)
    return leaf


def give_leaves_back() -> None:
    """Let functions written in Python get saved leaves themselves, from now on.

    Graphs outlive sessions and scopes, so this is never undone.
    """
    _NODE.saved_tensors = property(_saved_tensors)
