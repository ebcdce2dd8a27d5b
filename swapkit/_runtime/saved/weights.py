"""The weights that leave the device between two uses (`shim/cpp/held/held.hpp`)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from swapkit._runtime.shim.types import Mover, Placement
from swapkit._runtime.torch_compat.wrappers import (
    KINDS,
    is_wrapper,
    kinds_of_wrappers,
    tensors_inside,
)
from swapkit.ir.plans import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

# Objects of quantised weights have others inside, for scales that are quantised themselves.
DEEPEST = 3


def _list_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model that may leave, wrappers as they are.

    Torch runs the operators of a DTensor in C++, below the key. Nor may the weights of DDP leave:
    its collectives read them after their operator has returned.
    """
    if any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        return
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for each in (*model.parameters(), *model.buffers()):
        if not isinstance(each, sharded):
            yield each
            yield from _list_attributes(each)


def _list_attributes(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a frozen weight of another library's class keeps, such as scales.

    They are its own attributes, or those of objects there.
    """
    if type(weight) in KINDS or is_wrapper(weight) or weight.requires_grad:
        return
    holders: list[object] = [weight]
    for _ in range(DEEPEST):
        values = [value for each in holders for value in getattr(each, "__dict__", {}).values()]
        yield from (each for each in values if isinstance(each, torch.Tensor))
        holders = [each for each in values if not isinstance(each, (torch.nn.Module, ModuleType))]


def list_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that may leave: a model's parameters and buffers, or what is inside."""
    return [inside for each in _list_tensors(model) for inside in tensors_inside(each)]


def list_kinds(model: torch.nn.Module) -> set[type]:
    """Return the classes of wrappers whose insides may leave."""
    return {kind for each in _list_tensors(model) for kind in kinds_of_wrappers(each)}


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
