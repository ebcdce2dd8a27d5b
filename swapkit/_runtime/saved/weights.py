"""The weights that leave the device between two uses (`shim/cpp/held/held.hpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from swapkit._runtime.shim.types import Mover, Placement
from swapkit._runtime.torch_compat.wrappers import tensors_inside
from swapkit.ir.plans import Action

if TYPE_CHECKING:
    import torch


def hold_weights(mover: Mover, model: torch.nn.Module, min_bytes: int) -> None:
    """Let the parameters and buffers of a model leave. The runtime's lock is held.

    Those of DDP stay: its collectives read them after their operator has returned.

    Args:
        mover: moves them.
        model: the model.
        min_bytes: the least size of a storage that leaves.
    """
    if any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        return
    placement = Placement(Action.AUTO, min_bytes=min_bytes)
    for whole in (*model.parameters(), *model.buffers()):
        for tensor in tensors_inside(whole):
            if tensor.untyped_storage().nbytes() >= min_bytes:
                mover.hold(tensor, placement)
