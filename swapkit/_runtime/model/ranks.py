"""The ranks of this machine, and those that a model's layers are distributed over."""

from __future__ import annotations

import socket
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from swapkit._runtime.torch_compat.internals import connect_again, default_store
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# ---- node ranks ----------------------------------------------------------------------------------
#
# How many processes of this machine train together, so that each takes its part of the memory.
#
# The launcher knows (`config/environment.py`). Otherwise the ranks of the default process group
# write their machines' names to its store, once for each process group.

_log = get_logger("ranks")
PATIENCE_SECONDS = 5.0  # for ranks that have not written yet
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # containers of one machine have the same
_lock = threading.Lock()
# By process group.
_known: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def count_ranks() -> int:
    """Return how many processes train together, on all machines."""
    return torch.distributed.get_world_size() if _has_group() else 1


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def name_ranks(count: int) -> str:
    """Return a number of ranks in words."""
    return "one rank" if count == 1 else f"{count} ranks"


def count_node_ranks(*, waits: bool = True) -> int:
    """Return how many of them run on this machine, this process included.

    Where no launcher says so, the first call waits for the other ranks for at most
    `PATIENCE_SECONDS`. Ranks that have written nothing by then count as ranks of this machine: too
    small a part of its memory fails no other rank.

    Args:
        waits: whether to ask the other ranks; if not, and nobody has, all count.
    """
    launched = read_environment().node_processes
    if launched or count_ranks() == 1:
        return launched or 1
    group = torch.distributed.group.WORLD
    if not waits:
        return _known.get(group, count_ranks())
    with _lock:
        found = _known.get(group)
        if found is None:
            found = _known[group] = _ask()
        return found


def share_of_node(whole_bytes: int) -> int:
    """Return the part of the machine's memory, or of its disk, that this process may share out."""
    count = count_node_ranks()
    if count > 1:
        _log.info("shares are of 1/%d of the machine: %d ranks train on it", count, count)
    return whole_bytes // count


def _ask() -> int:
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    keys = [f"swapkit/machines/{each}" for each in range(count)]
    here = _name_of_machine()
    try:
        store = connect_again(default_store())
        store.set(keys[rank], here)
        try:
            store.wait(keys, timedelta(seconds=PATIENCE_SECONDS))
        except torch.distributed.DistStoreError:  # some rank has not written
            _log.warning(
                "rank %d does not know on which machines the others run: %d have not said so",
                rank,
                sum(not store.check([key]) for key in keys),
            )
        names = [store.get(key).decode() if store.check([key]) else here for key in keys]
    except (RuntimeError, ValueError) as error:
        _log.warning("rank %d counts all ranks as those of its machine: %s", rank, error)
        return count
    return names.count(here)


def _name_of_machine() -> str:
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return boot or socket.gethostname()


# ---- device mesh ---------------------------------------------------------------------------------
#
# This rank, and the ranks that a model's layers are distributed over.


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
    if not _has_group():
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
    if not _has_group():
        return []
    from torch.distributed.tensor import DTensor

    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def is_fsdp(model: torch.nn.Module) -> bool:
    """Return whether a model uses FSDP 1 or 2, which free the weights' memory between uses."""
    if not _has_group():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
