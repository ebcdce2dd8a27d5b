"""Plain tensors: their bytes are those of their storage, and no subclass code runs for them."""

from __future__ import annotations

from typing import TypeGuard

import torch

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
