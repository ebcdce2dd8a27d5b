"""Torch's memory statistics of an accelerator, answered from our pools.

With a replaced allocator, torch's statistics functions raise, and those of `torch_npu` end the
process. They all call a few functions of a C module. This module replaces those with functions that
return the same structures. So `torch.cuda.memory_allocated`, `memory_stats`, `memory_summary`,
`memory_snapshot`, `reset_peak_memory_stats` and related functions, also in `torch.npu` and
`torch.accelerator`, keep working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapkit._native.pool import BlockState
from swapkit._native.pool_stats import STAT_FIELDS, STAT_NAMES, STAT_POOLS
from swapkit._runtime.torch_compat.internals import C

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit._native.pool import BlockInfo, Pool, SegmentInfo
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.torch_compat.accelerators import Accelerator

# Torch counts these; our pool never has any.
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


def repair_statistics(accelerator: Accelerator, opened: Mapping[int, Installation]) -> None:
    """Make torch's functions query our pools. `opened`: the devices in use, by index.

    A device that is not in use reports zeros; a query does not open it.
    """
    answers = _Answers(accelerator, opened)
    own = {
        "memoryStats": answers.stats,
        "resetPeakMemoryStats": answers.reset_peak,
        "resetAccumulatedMemoryStats": answers.reset_accumulated,
        "getMemoryFraction": answers.fraction,
        "memorySnapshot": answers.snapshot,
    }
    common = {  # the originals check whether torch's own allocator is in use
        "_accelerator_isAllocatorInitialized": answers.is_in_use,
        "_accelerator_emptyCache": accelerator.module.empty_cache,
        "_accelerator_getDeviceStats": answers.stats,
        "_accelerator_resetPeakStats": answers.reset_peak,
        "_accelerator_resetAccumulatedStats": answers.reset_accumulated,
    }
    functions = accelerator.functions
    replacements = [(functions, f"_{accelerator.type}_{name}", own[name]) for name in own]
    replacements += [(C, name, common[name]) for name in common]
    for module, name, function in replacements:
        if hasattr(module, name):
            setattr(module, name, function)


class _Answers:
    """Replacements of torch's C functions, answered from our pools."""

    def __init__(self, accelerator: Accelerator, opened: Mapping[int, Installation]) -> None:
        self._accelerator = accelerator
        self._opened = opened

    def is_in_use(self) -> bool:
        return bool(self._opened)

    def stats(self, device: int) -> dict[str, Any]:
        installation = self._opened.get(device)
        return nest_stats({} if installation is None else installation.pool.stats())

    def reset_peak(self, device: int) -> None:
        if device in self._opened:
            self._opened[device].pool.reset_peak()

    def reset_accumulated(self, device: int) -> None:
        if device in self._opened:
            self._opened[device].pool.reset_accumulated()

    def fraction(self, device: int) -> float:
        installation = self._opened.get(device)
        if installation is None or not installation.limit_bytes:
            return 1.0
        return installation.limit_bytes / installation.total_bytes

    def snapshot(self, *_: object) -> dict[str, Any]:
        return {
            "segments": [
                segment
                for index, installation in sorted(self._opened.items())
                for segment in _segments(index, installation.pool)
            ],
            "device_traces": [[] for _ in range(self._accelerator.count())],
            "external_annotations": [],
            "allocator_settings": {},
        }


def nest_stats(flat: dict[str, int]) -> dict[str, Any]:
    """Nest statistics by name, pool and field, as torch's C functions do; absent ones are 0."""
    nothing = dict.fromkeys(STAT_FIELDS, 0)
    nested: dict[str, Any] = {
        name: {
            pool: {field: flat.get(f"{name}.{pool}.{field}", 0) for field in STAT_FIELDS}
            for pool in STAT_POOLS
        }
        for name in STAT_NAMES
    }
    nested |= {name: flat.get(name, 0) for name in COUNTS}
    nested |= dict.fromkeys(ABSENT_COUNTS, 0)
    nested |= {name: dict(nothing) for name in ABSENT_STATS}
    nested["reserved_bytes_by_private_pools"] = {}
    nested["max_split_size"] = flat.get("max_split_size", -1)  # -1: none
    return nested


def _segments(index: int, pool: Pool) -> list[dict[str, Any]]:
    """Return the segments of a device in the format of torch's snapshots."""
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
