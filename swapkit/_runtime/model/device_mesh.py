"""The ranks that the layers of a model are spread over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def check_group(group: object) -> None:
    """Check that something is a group of ranks, or None.

    Raises:
        InvalidArgument: it is not.
    """
    kind = getattr(torch.distributed, "ProcessGroup", None)
    if group is not None and (kind is None or not isinstance(group, kind)):
        raise InvalidArgument(
            f"tensor_parallel_group={group!r}: expected a torch.distributed.ProcessGroup"
        )


def find_tensor_parallel_group(model: torch.nn.Module) -> Any:  # noqa: ANN401 - ProcessGroup
    """Return the group of ranks that a model's weights are sharded over by tensor parallelism.

    The mesh dimension named `tp`; where dimensions have no names, the last one that a parameter is
    sharded over, unless FSDP shards: its ranks see different data. None: no parameter is.
    """
    for parameter in _list_spread(model):
        mesh: DeviceMesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            return mesh.get_group("tp")
        sharded = [i for i, place in enumerate(parameter.placements) if place.is_shard()]
        if sharded and not names and not is_fsdp(model):
            return mesh.get_group(sharded[-1])
    return None


def _list_spread(model: torch.nn.Module) -> list[DTensor]:
    """Return the parameters that are spread over ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def is_fsdp(model: torch.nn.Module) -> bool:
    """Return whether FSDP, in either form, takes the memory of a model's weights away meanwhile."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
