"""Torch's own CUDA allocator as a pool, and torch's statistics answered from our pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from swapkit._native.pool import (
    STAT_FIELDS,
    STAT_NAMES,
    STAT_POOLS,
    BlockInfo,
    BlockState,
    Pool,
    RingKind,
    SegmentInfo,
)
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.saved.device import Device
from swapkit._runtime.torch_compat.accelerators import Accelerator
from swapkit._runtime.torch_compat.internals import C, observe_cuda_out_of_memory
from swapkit.errors import OverBudget
from swapkit.units import format_bytes

# ---- torch allocator -----------------------------------------------------------------------------
#
# Torch's own CUDA allocator as a pool: its statistics, its limit, and rescues.

STATES = {
    "active_allocated": BlockState.IN_USE,
    "active_pending_free": BlockState.PENDING,
    "active_awaiting_free": BlockState.PENDING,
    "inactive": BlockState.CACHED,
}
# Prefetches leave at least this share of the budget free for operators,
ROOM = 1 / 64
# and room for this many requests of the largest size, as a backward operator makes, each with the
# bytes that torch's own allocator may waste on it.
REQUESTS = 2
TORCHS_SEGMENT_BYTES = 20 << 20


class TorchPool:
    """Torch's own allocator on one GPU, as a pool whose budget is its memory fraction."""

    address = 0  # there is no native pool

    def __init__(self, device: Device) -> None:
        self._device = device
        self._index = device.index
        self._usage = device.shared.shim.device_usage
        self._budget_bytes = 0
        self._users_fraction = 1.0  # in force before there was a budget
        self._is_on = False
        self._seen_peak_bytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more would leave room in the budget for operators.

        A more urgent request cannot take prefetched memory back.
        """
        if self._budget_bytes == 0:
            return True
        request_bytes = self._device.largest_bytes + TORCHS_SEGMENT_BYTES
        spare_bytes = max(int(self._budget_bytes * ROOM), REQUESTS * request_bytes)
        return self.in_use_bytes() + nbytes <= self._budget_bytes - spare_bytes

    def in_use_bytes(self) -> int:
        """Return the allocated bytes."""
        return self._usage(self._device.type, self._index)[0]

    def moving_seconds(self) -> float:
        """Return 0: torch moves nothing."""
        return 0.0

    def peak_take(self) -> int:
        """Return the peak of reserved bytes since the last call.

        Torch keeps one peak, and only the user may reset it. Without a new peak, return the bytes
        reserved now: these fall only when torch returns memory to the device.
        """
        stats = torch.cuda.memory_stats(self._index)
        peak_bytes = int(stats.get("reserved_bytes.all.peak", 0))
        is_new = peak_bytes > self._seen_peak_bytes
        self._seen_peak_bytes = peak_bytes
        return peak_bytes if is_new else int(stats.get("reserved_bytes.all.current", 0))

    def stats(self) -> dict[str, int]:
        """Return torch's statistics under their flat names, and ours."""
        rescues, rescued_bytes = self._device.shared.shim.native_rescues(self._index)
        return {
            **torch.cuda.memory_stats(self._index),
            "num_rescues": rescues,
            "rescued_bytes": rescued_bytes,
            "budget_bytes": self._budget_bytes,
        }

    def reset_peak(self) -> None:
        """Set every peak to the current value."""
        torch.cuda.reset_peak_memory_stats(self._index)
        self._seen_peak_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """Change the memory fraction; empty the cache first if necessary. 0: no budget.

        Raises:
            OverBudget: more memory than that is reserved; the fraction is unchanged.
        """
        total_bytes = self._device.backend.memory_info().total_bytes
        reserved_bytes = self._usage(self._device.type, self._index)[1]
        if budget_bytes and reserved_bytes > budget_bytes:
            self.trim()
            reserved_bytes = self._usage(self._device.type, self._index)[1]
            if reserved_bytes > budget_bytes:
                raise OverBudget(
                    f"a budget of {format_bytes(budget_bytes)} is too small: "
                    f"{format_bytes(reserved_bytes)} are still reserved"
                )
        fraction = min(1.0, budget_bytes / total_bytes) if budget_bytes else 1.0
        if budget_bytes and not self._budget_bytes:
            self._users_fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        fraction = min(fraction, self._users_fraction)
        if budget_bytes or self._budget_bytes:
            torch.cuda.set_per_process_memory_fraction(fraction, self._index)
        self._budget_bytes = budget_bytes
        self._apply()

    def set_rescue(self, rescue: Callable[[int], int] | None) -> None:
        """Switch rescues on or off; they run in C++, without the interpreter."""
        self._is_on = rescue is not None
        self._apply()

    def _apply(self) -> None:
        self._device.shared.shim.native_rescue(self._index, self._budget_bytes, self._is_on)

    def trim(self) -> None:
        """Return all cached memory to the device."""
        torch.cuda.empty_cache()

    def owns(self, address: int) -> bool:
        """Return whether an address may be in the pool; any CUDA address may."""
        return address != 0

    def blocks(self) -> Sequence[BlockInfo]:
        """Describe every block."""
        return [
            BlockInfo(
                address=block["address"],
                nbytes=block["size"],
                requested_bytes=block.get("requested_size", block["size"]),
                stream=segment["stream"],
                tag=0,
                state=STATES[block["state"]],
            )
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == self._index
            for block in segment["blocks"]
        ]

    def note(self, kind: RingKind, nbytes: int = 0) -> None:
        """Do nothing: there is no ring."""


class NativeInstallation(Installation[TorchPool]):
    """A GPU that keeps torch's own allocator."""

    def __init__(self, device: Device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device.makes_reclaimable = True
        super().__init__(device, TorchPool(device))
        self.active = True
        # A failed request tells the size to expect next time.
        observe_cuda_out_of_memory(
            lambda index, asked_bytes, *_: _note_failure(device, index, asked_bytes)
        )


def _note_failure(device: Device, index: int, asked_bytes: int) -> None:
    """Expect requests of a failed size, unless it exceeds half of the budget."""
    if index == device.index and asked_bytes <= device.budget_bytes // 2:
        device.expect(asked_bytes)


# ---- torch statistics ----------------------------------------------------------------------------
#
# Torch's memory statistics of an accelerator, answered from our pools.
#
# With a replaced allocator, torch's statistics functions raise, and those of `torch_npu` end the
# process. They all call a few functions of a C module. This module replaces those with functions
# that return the same structures. So `torch.cuda.memory_allocated`, `memory_stats`,
# `memory_summary`, `memory_snapshot`, `reset_peak_memory_stats` and related functions, also in
# `torch.npu` and `torch.accelerator`, keep working.

# Torch counts these; our pool never has any.
ABSENT_COUNTS = ("num_oom_rejections",)
ABSENT_STATS = ("oversize_allocations", "oversize_segments")
_STATES = {
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
                "state": _STATES[block.state],
                "frames": [],
            }
            for block in blocks
        ],
    }
