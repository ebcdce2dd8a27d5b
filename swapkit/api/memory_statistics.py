"""Statistics of the pool, under torch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.allocators.installation import choose_device, installed_pool
from swapkit.reporting.text import format_stats

if TYPE_CHECKING:
    import torch


def memory_stats(device: str | torch.device | None = None) -> dict[str, int]:
    """Return a pool's statistics under the keys of `torch.cuda.memory_stats()`.

    Byte counts come as `NAME.POOL.FIELD`, for example `allocated_bytes.all.peak`; POOL is `all`,
    `small_pool` or `large_pool`, FIELD `current`, `peak`, `allocated` or `freed`. Besides torch's
    there are `num_rescues`, `rescued_bytes`, `budget_bytes` (0: no budget), `moved_bytes` (of free
    memory, to where a request could use them), `moving_ns` (the time that took where memory has one
    address at a time, as on a CPU), `maps` and `unmaps` (of granules), `alias_failures` (how often
    the driver did not map memory at a second address; the pool then gives free memory back and
    takes it anew, which costs time), and the effect of `PYTORCH_ALLOC_CONF`: `max_split_size` (-1:
    none), `expandable_segments`, `num_garbage_collections` and `garbage_collected_bytes`.

    Args:
        device: whose; None: of the current GPU if swapkit is installed on CUDA, else of the CPU.

    Raises:
        SessionError: swapkit is not installed there.
    """
    return installed_pool(device).stats()


def memory_summary(device: str | torch.device | None = None) -> str:
    """Return a pool's statistics as a table for people.

    Args:
        device: see `memory_stats`.

    Raises:
        SessionError: swapkit is not installed there.
    """
    name = choose_device(device)
    return format_stats(memory_stats(name), title=f"swapkit memory, device {name}")


def reset_peak_memory_stats(device: str | torch.device | None = None) -> None:
    """Set the peaks of `memory_stats()` to the current values.

    A session's own `stats.peak_bytes` is not affected.

    Args:
        device: see `memory_stats`.

    Raises:
        SessionError: swapkit is not installed there.
    """
    installed_pool(device).reset_peak()
