"""The weights that leave the device between two uses (`shim/cpp/held/held.hpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from swapkit._runtime.shim.types import Mover, Placement
from swapkit._runtime.torch_compat.wrappers import is_wrapper
from swapkit.ir.plans import Action

if TYPE_CHECKING:
    import torch


def list_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model that may leave: no wrapper of tensors may.

    Nor may those of DDP: its collectives read them after their operator has returned.
    """
    if any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        return []
    return [each for each in (*model.parameters(), *model.buffers()) if not is_wrapper(each)]


def list_named(model: torch.nn.Module | None) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model by all of their names."""
    if model is None:
        return []
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def hold_weights(mover: Mover, weights: list[torch.Tensor], min_bytes: int) -> None:
    """Let weights leave, as long as nothing else holds their memory. The runtime's lock is held.

    Args:
        mover: moves them.
        weights: all tensors of the program with their memory.
        min_bytes: the least size of a storage that leaves.
    """
    placement = Placement(Action.AUTO, min_bytes=min_bytes)
    for each in weights:
        mover.hold(each, placement)
    mover.begin_held()
