"""How a tensor looked: its version, how it views its memory, and memory of the same form."""

from __future__ import annotations

import functools

import torch


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without memory, whose data anybody may have."""
    return torch.empty(0, dtype=dtype, device=device)


class Version:
    """The version of a tensor, whose memory it does not keep."""

    __slots__ = ("_tracker", "then")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tracker = tensor.detach()  # shares the counter
        self._tracker.data = _empty(tensor.dtype, tensor.device)
        self.then = self.now

    @property
    def now(self) -> int:
        return self._tracker._version  # noqa: SLF001


class Layout:
    """How a tensor views its storage."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset, self._dtype = tensor.storage_offset(), tensor.dtype

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that views a storage in this way."""
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, self._offset, self._size, self._stride)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._parts == other._parts

    @property
    def _parts(self) -> tuple[object, ...]:
        return self._size, self._stride, self._offset, self._dtype

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return f"{self._dtype} {list(self._size)}"


class Scratch:
    """Stands for an operand that an operator changes, and of which its results do not depend."""

    __slots__ = ("_device", "_dtype", "_size", "_stride")

    def __init__(self, operand: torch.Tensor) -> None:
        self._size, self._stride = operand.size(), operand.stride()
        self._dtype, self._device = operand.dtype, operand.device

    def make(self) -> torch.Tensor:
        """Return memory of the same form."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
