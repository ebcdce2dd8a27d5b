"""How a tensor looked: how it views its memory, and memory of the same form."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """How a tensor views its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that views a storage in this way."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def __repr__(self) -> str:
        return f"{self.dtype} {list(self.size)}"


# Steps make the same ones over and over, some for each saved tensor: the collector looks at each.
_known = functools.lru_cache(maxsize=1024)(Layout)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return how a tensor views its storage."""
    return _known(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)


class Scratch:
    """Stands for an operand that an operator changes, and of which its results do not depend."""

    __slots__ = ("_device", "_dtype", "_size", "_stride")

    def __init__(self, operand: torch.Tensor) -> None:
        self._size, self._stride = operand.size(), operand.stride()
        self._dtype, self._device = operand.dtype, operand.device

    def make(self) -> torch.Tensor:
        """Return memory of the same form."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
