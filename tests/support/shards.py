"""What a rank holds of sharded parameters and optimizer states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from tests.support.sessions import digest

if TYPE_CHECKING:
    import torch
    from torch import nn


def local_of(tensor: Any) -> torch.Tensor:
    """Return the local part of a sharded tensor, or the tensor itself."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def digest_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a digest of this rank's parameters and buffers, and one of its optimizer states."""
    shards = [local_of(each) for each in model.state_dict().values()]
    states = [
        local_of(value)
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    ]
    return [digest(shards), digest(states)]
