"""This rank, and the ranks that a model's layers are distributed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def check_group(group: object) -> None:
    """Check that `group` is a process group or None.

    Raises:
        InvalidArgument: `group` is neither.
    """
    kind = getattr(torch.distributed, "ProcessGroup", None)
    if group is not None and (kind is None or not isinstance(group, kind)):
        raise InvalidArgument(
            f"tensor_parallel_group={group!r}: expected a torch.distributed.ProcessGroup"
        )


def describe_rank() -> str:
    """Return which rank this process is, as in "rank 1 of 2"; empty: there are no other ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"


def find_tensor_parallel_group(model: torch.nn.Module) -> Any:  # noqa: ANN401 - ProcessGroup
    """Return the process group over which tensor parallelism shards a model's weights.

    This is the mesh dimension named `tp`. Without dimension names, it is the last dimension that
    shards a parameter, except under FSDP, whose ranks see different data. None: there is no group.
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
    """Return the parameters that are distributed over ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def is_fsdp(model: torch.nn.Module) -> bool:
    """Return whether a model uses FSDP 1 or 2, which free the weights' memory between uses."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
