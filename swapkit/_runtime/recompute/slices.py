"""A region's input activations, kept in slices: each rank of a group keeps its own part.

This is for tensor parallelism, where every rank of the group gets the same values. The code assumes
that and does not check: if ranks differ, recomputation gets a mixture. A slice is a copy, so the
activation may be changed in place afterwards. Parameters and other leaves, tensors without
gradient, subclasses, and tensors that do not divide by the number of ranks are kept whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from swapkit._runtime.torch_compat.graphs import gathers_gradients
from swapkit._runtime.torch_compat.isolation import hidden

if TYPE_CHECKING:
    from collections.abc import Sequence


# Renamed in torch 2.13.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _WholeForm(NamedTuple):
    """The layout of the whole tensor that a slice belongs to."""

    shape: torch.Size
    strides: tuple[int, ...]
    is_contiguous: bool


class Slices:
    """The tensors of one call that are kept in slices."""

    def __init__(self, group: Any, tensors: list[torch.Tensor]) -> None:  # noqa: ANN401 - a group
        """Replace each tensor that can be sliced with this rank's slice."""
        self._group = group
        self._ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._forms: dict[int, _WholeForm] = {}
        for index, tensor in enumerate(tensors):
            if self._ranks > 1 and _can_slice(tensor, self._ranks):
                form = _WholeForm(tensor.shape, tensor.stride(), tensor.is_contiguous())
                self._forms[index] = form
                tensors[index] = _slice(tensor, rank, self._ranks)

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole tensors; every rank of the group must call this."""
        return [
            self._gather(tensor, self._forms[index]) if index in self._forms else tensor
            for index, tensor in enumerate(tensors)
        ]

    def _gather(self, part: torch.Tensor, form: _WholeForm) -> torch.Tensor:
        with torch.no_grad():
            # As bytes: not every backend supports every dtype.
            bits = part.view(torch.uint8)
            whole_bits = bits.new_empty(bits.numel() * self._ranks)
            _gather_single(whole_bits, bits, group=self._group)
            whole = whole_bits.view(part.dtype).view(form.shape)
            if not form.is_contiguous:
                whole = whole.new_empty_strided(form.shape, form.strides).copy_(whole)
        return whole.requires_grad_()


def _can_slice(tensor: torch.Tensor, ranks: int) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.requires_grad
        and not gathers_gradients(tensor)
        and tensor.numel() % ranks == 0
        and tensor.numel() > 0
        and not any(
            stride == 0 and size > 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def _slice(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    with hidden(), torch.no_grad():
        numel = tensor.numel() // ranks
        flat = tensor.detach().reshape(-1)
        return flat[rank * numel : (rank + 1) * numel].clone()
