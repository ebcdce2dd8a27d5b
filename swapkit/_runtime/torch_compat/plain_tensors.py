"""Plain tensors: their bytes are those of their storage, and no subclass code runs for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a strided tensor of one of torch's own classes."""
    return isinstance(value, KINDS) and type(value) in KINDS and value.layout is torch.strided


def has_bytes(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a plain tensor whose storage has memory."""
    if not is_plain(value) or value.device.type == "meta":
        return False
    try:
        storage = value.untyped_storage()
        return storage.nbytes() > 0 and storage.data_ptr() != 0
    except RuntimeError:  # raised by a function transform's tensor
        return False


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a wrapper subclass consists of, such as a DTensor's local shard.

    Any other tensor is its own only part. Parts of parts are taken apart, too.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh, too
            yield from plain_parts(part)
