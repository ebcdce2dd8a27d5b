"""The functions of torch that tell of CUDA memory, answered from our pools.

Torch asks its allocator for statistics, and one that is not its own cannot answer: its functions
raise. They all come down to a few of C, which are replaced here by ones of the same results, so
that `torch.cuda.memory_allocated`, `memory_stats`, `memory_summary`, `memory_snapshot`,
`reset_peak_memory_stats` and their relatives, in `torch.accelerator` too, work as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit._native.pool import STAT_FIELDS, STAT_NAMES, STAT_POOLS, BlockState, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._native.pool import BlockInfo, SegmentInfo
    from swapkit._runtime.installation import Installation

# What torch counts and our pool never has.
ABSENT_COUNTS = ("num_oom_rejections",)
ABSENT_STATS = ("oversize_allocations", "oversize_segments")
STATES = {
    BlockState.IN_USE: "active_allocated",
    BlockState.PENDING: "active_pending_free",
    BlockState.CACHED: "inactive",
}
COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


def repair_statistics(find: Callable[[int | None], Installation]) -> None:
    """Let torch's functions ask our pools; `find` returns a GPU's installation."""

    def pool_of(device: int) -> Pool:
        pool = find(device).pool
        assert isinstance(pool, Pool)
        return pool

    def memory_stats(device: int) -> dict[str, Any]:
        return nest_stats(pool_of(device).stats())

    def reset_peak(device: int) -> None:
        pool_of(device).reset_peak()

    def reset_accumulated(device: int) -> None:
        pool_of(device).reset_accumulated()

    def memory_fraction(device: int) -> float:
        installation = find(device)
        budget_bytes = installation.limit_bytes or installation.total_bytes
        return budget_bytes / installation.total_bytes

    def memory_snapshot(*_: object) -> dict[str, Any]:
        return take_snapshot()

    def take_snapshot() -> dict[str, Any]:
        devices = range(torch.cuda.device_count())
        return {
            "segments": [segment for index in devices for segment in _segments(find, index)],
            "device_traces": [[] for _ in devices],
            "external_annotations": [],
            "allocator_settings": {},
        }

    functions = {
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_getMemoryFraction": memory_fraction,
        "_cuda_memorySnapshot": memory_snapshot,
        # They ask whether the allocator is in use, and mean torch's own.
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": torch.cuda.empty_cache,
        "_accelerator_getDeviceStats": memory_stats,
        "_accelerator_resetPeakStats": reset_peak,
        "_accelerator_resetAccumulatedStats": reset_accumulated,
    }
    for name, function in functions.items():
        if hasattr(torch._C, name):  # noqa: SLF001 - torch has no public way to answer for it
            setattr(torch._C, name, function)  # noqa: SLF001


def nest_stats(flat: dict[str, int]) -> dict[str, Any]:
    """Return statistics as torch's C functions do: by name, pool and field."""
    nothing = dict.fromkeys(STAT_FIELDS, 0)
    nested: dict[str, Any] = {
        name: {
            pool: {field: flat[f"{name}.{pool}.{field}"] for field in STAT_FIELDS}
            for pool in STAT_POOLS
        }
        for name in STAT_NAMES
    }
    nested |= {name: flat[name] for name in COUNTS}
    nested |= dict.fromkeys(ABSENT_COUNTS, 0)
    nested |= {name: dict(nothing) for name in ABSENT_STATS}
    nested["reserved_bytes_by_private_pools"] = {}
    nested["max_split_size"] = -1  # none
    return nested


def _segments(find: Callable[[int | None], Installation], index: int) -> list[dict[str, Any]]:
    """Return the segments of a GPU as torch's snapshots have them."""
    pool = find(index).pool
    assert isinstance(pool, Pool)  # this is for ours
    blocks = sorted(pool.blocks(), key=lambda block: block.address)
    segments = []
    for segment in pool.segments():
        end = segment.address + segment.nbytes
        inside = [block for block in blocks if segment.address <= block.address < end]
        if inside:
            segments.append(_describe(index, segment, inside))
    return segments


def _describe(index: int, segment: SegmentInfo, blocks: list[BlockInfo]) -> dict[str, Any]:
    in_use = [block for block in blocks if block.state is BlockState.IN_USE]
    return {
        "device": index,
        "address": segment.address,
        "total_size": segment.committed_bytes,
        "allocated_size": sum(block.nbytes for block in in_use),
        "active_size": sum(b.nbytes for b in blocks if b.state is not BlockState.CACHED),
        "requested_size": sum(block.requested_bytes for block in in_use),
        "stream": blocks[0].stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.committed_bytes < segment.nbytes,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.nbytes,
                "requested_size": block.requested_bytes,
                "state": STATES[block.state],
                "frames": [],
            }
            for block in blocks
        ],
    }
