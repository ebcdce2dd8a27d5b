"""`budget("auto")`: the memory that is free on a device now, less a reserve.

What the pool has reserved counts as free: a session may use it. Of a device that several processes
of this machine share, each gets an equal part of what is free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from swapkit._runtime.allocators.host_memory import host_available_bytes
from swapkit._runtime.model.node_ranks import count_node_ranks
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger
from swapkit.units import MIB, format_bytes

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation

AUTO = "auto"
# Left to what takes memory of a GPU or NPU beside the pool, partly only later in training: kernels
# that the driver loads on first use, buffers of NCCL and HCCL, handles of libraries.
DEVICE_RESERVE_SHARE, DEVICE_RESERVE_BYTES = 0.04, 512 * MIB
# Left to other programs, and to this one's memory outside of the pool. Host copies take more.
HOST_RESERVE_SHARE, HOST_RESERVE_BYTES = 0.10, 256 * MIB

_log = get_logger(__name__)


def find_free_limit(installation: Installation[Any]) -> int:
    """Return the bytes that a session may reserve on a device now, and log how they came about.

    Raises:
        InvalidArgument: less is free than the reserve.
    """
    name = installation.device.name
    if name == CPU:
        free_bytes, total_bytes = host_available_bytes(), installation.total_bytes
        reserve_bytes = max(HOST_RESERVE_BYTES, int(HOST_RESERVE_SHARE * total_bytes))
    else:
        memory = installation.device.backend.memory_info()
        free_bytes = memory.free_bytes
        reserve_bytes = max(DEVICE_RESERVE_BYTES, int(DEVICE_RESERVE_SHARE * memory.total_bytes))
    pool_bytes: int = installation.pool.stats()["reserved_bytes.all.current"]
    if name == CPU:
        processes = count_node_ranks()
    else:
        processes = _count_processes(ACCELERATORS[name.type].count())
    limit_bytes = pool_bytes + (free_bytes - reserve_bytes) // processes
    made = (
        f"{format_bytes(free_bytes)} free on {name}, less a reserve of "
        f"{format_bytes(reserve_bytes)}"
        f"{f', shared by {processes} processes' if processes > 1 else ''}, and "
        f"{format_bytes(pool_bytes)} that this process has reserved"
    )
    if limit_bytes <= 0:
        raise InvalidArgument(
            f"limit='auto': nothing is left ({made}). Free memory, or name the bytes yourself, "
            "e.g. '2GiB'"
        )
    _log.info("budget 'auto': %s = %s", format_bytes(limit_bytes), made)
    return limit_bytes


def _count_processes(devices: int) -> int:
    """Return how many processes of this machine share each of its devices."""
    return math.ceil(read_environment().local_processes / max(1, devices))
