"""Statistics of the pool, under torch's names."""

from __future__ import annotations

from swapkit._runtime.installation import installed_pool
from swapkit.reporting.text import format_stats


def memory_stats() -> dict[str, int]:
    """Return the pool's statistics under the keys of `torch.cuda.memory_stats()`.

    Byte counts come as `NAME.POOL.FIELD`, for example `allocated_bytes.all.peak`; POOL is `all`,
    `small_pool` or `large_pool`, FIELD `current`, `peak`, `allocated` or `freed`. Besides torch's
    there are `num_rescues`, `rescued_bytes` and `budget_bytes` (0: no budget).

    Raises:
        SessionError: swapkit is not installed.
    """
    return installed_pool().stats()


def memory_summary() -> str:
    """Return the pool's statistics as a table for people.

    Raises:
        SessionError: swapkit is not installed.
    """
    return format_stats(memory_stats(), title="swapkit memory, device cpu")


def reset_peak_memory_stats() -> None:
    """Set the peaks of `memory_stats()` to the current values.

    A session's own `stats.peak_bytes` is not affected.

    Raises:
        SessionError: swapkit is not installed.
    """
    installed_pool().reset_peak()
