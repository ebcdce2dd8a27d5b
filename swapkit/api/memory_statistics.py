"""Statistics of the pool, under torch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.allocators.installation import choose_device, installed_pool
from swapkit.reporting.text import format_stats

if TYPE_CHECKING:
    import torch


def memory_stats(device: str | torch.device | None = None) -> dict[str, int]:
    """Return a pool's statistics under the keys of `torch.cuda.memory_stats()`.

    Byte counts have keys `NAME.POOL.FIELD`, such as `allocated_bytes.all.peak`; POOL is `all`,
    `small_pool` or `large_pool`, FIELD `current`, `peak`, `allocated` or `freed`. Keys that torch
    does not have: `num_rescues`, `rescued_bytes`, `budget_bytes` (0: no budget), `moved_bytes`
    (free memory moved to where a request can use it), `moving_ns` (time spent moving it where
    memory has one address at a time, as on a CPU), `maps` and `unmaps` (of granules),
    `alias_failures` (times the driver failed to map memory at a second address; the pool then
    releases free memory and allocates it again, which costs time). The effect of
    `PYTORCH_ALLOC_CONF` is in `max_split_size` (-1: none), `expandable_segments`,
    `num_garbage_collections` and `garbage_collected_bytes`.

    Args:
        device: the pool's device; None: the current accelerator if swapkit is installed there,
            else the CPU.

    Raises:
        SessionError: swapkit is not installed on the device.
    """
    return installed_pool(device).stats()


def memory_summary(device: str | torch.device | None = None) -> str:
    """Return a pool's statistics as a readable table.

    Args:
        device: see `memory_stats`.

    Raises:
        SessionError: swapkit is not installed on the device.
    """
    name = choose_device(device)
    return format_stats(memory_stats(name), title=f"swapkit memory, device {name}")


def reset_peak_memory_stats(device: str | torch.device | None = None) -> None:
    """Set the peaks of `memory_stats()` to the current values.

    A session's own `stats.peak_bytes` is not affected.

    Args:
        device: see `memory_stats`.

    Raises:
        SessionError: swapkit is not installed on the device.
    """
    installed_pool(device).reset_peak()
