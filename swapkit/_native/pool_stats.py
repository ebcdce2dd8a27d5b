"""A pool's statistics under torch's flat names."""

from __future__ import annotations

from typing import Any

STAT_NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
STAT_POOLS = ("all", "small_pool", "large_pool")
STAT_FIELDS = ("current", "peak", "allocated", "freed")
COUNT_NAMES = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_rescues",
    "rescued_bytes",
    "budget_bytes",
    "max_split_size",
    "expandable_segments",
    "num_garbage_collections",
    "garbage_collected_bytes",
    "moved_bytes",
    "moving_ns",
    "maps",
    "unmaps",
    "alias_failures",
    "num_settles",
    "largest_given_bytes",
    "num_splits",
)


def flat_stats(stats: Any) -> dict[str, int]:
    """Return a `sk_pool_stats` under names such as `allocated_bytes.all.peak`."""
    flat = {
        f"{name}.{pool}.{field}": getattr(getattr(stats, name)[i], field)
        for name in STAT_NAMES
        for i, pool in enumerate(STAT_POOLS)
        for field in STAT_FIELDS
    }
    flat.update({name: getattr(stats, name) for name in COUNT_NAMES})
    return flat
