"""A pool's history as torch's memory snapshot, for `torch.cuda._memory_viz` and its web page.

Source:
    torch/cuda/memory.py, `_snapshot`; torch/csrc/cuda/memory_snapshot.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from swapkit.ir.pool_histories import BlockUse, PoolEventKind

if TYPE_CHECKING:
    from swapkit.ir.pool_histories import PoolBlock, PoolEvent, PoolHistory, PoolSegment

Entry: TypeAlias = "dict[str, Any]"

MODULE_FILE = "module"  # the "file" of a frame whose name is a module's path
_NS_PER_US = 1000
_STATES = {
    BlockUse.IN_USE: "active_allocated",
    BlockUse.AWAITED: "active_pending_free",
    BlockUse.FREE: "inactive",
}
_ACTIONS = {
    PoolEventKind.TAKE: "alloc",
    PoolEventKind.GIVE: "free_requested",
    PoolEventKind.FREE: "free_completed",
    PoolEventKind.MAP: "segment_map",
    PoolEventKind.UNMAP: "segment_unmap",
    PoolEventKind.OUT_OF_MEMORY: "oom",
}
_WHOLE = {PoolEventKind.MAP: "segment_alloc", PoolEventKind.UNMAP: "segment_free"}
_OF_BLOCKS = {PoolEventKind.TAKE, PoolEventKind.GIVE, PoolEventKind.FREE}


def encode_snapshot(history: PoolHistory) -> dict[str, object]:
    """Return the content of a snapshot: lists, dictionaries, numbers and text only."""
    traces: list[list[Entry]] = [[] for _ in range(history.device_index + 1)]
    traces[history.device_index] = _encode_events(history)
    return {
        "segments": [_encode_segment(each, history) for each in history.segments],
        "device_traces": traces,
        "allocator_settings": {"expandable_segments": history.moves_granules},
        "external_annotations": _encode_steps(history),
    }


def _encode_segment(segment: PoolSegment, history: PoolHistory) -> Entry:
    used = [block for block in segment.blocks if block.use is BlockUse.IN_USE]
    active = [block for block in segment.blocks if block.use is not BlockUse.FREE]
    return {
        "device": history.device_index,
        "address": segment.address,
        "total_size": segment.nbytes,
        "allocated_size": sum(block.nbytes for block in used),
        "active_size": sum(block.nbytes for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": segment.blocks[0].stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": history.moves_granules,
        "frames": [],
        "blocks": [_encode_block(block) for block in segment.blocks],
    }


def _encode_block(block: PoolBlock) -> Entry:
    return {
        "address": block.address,
        "size": block.nbytes,
        "requested_size": block.requested_bytes,
        "state": _STATES[block.use],
        "frames": _frames(block.label),
    }


def _encode_events(history: PoolHistory) -> list[Entry]:
    """Return the entries in the order of the pool's events; copies have none."""
    actions = _ACTIONS if history.moves_granules else {**_ACTIONS, **_WHOLE}
    return [
        _encode_event(each, actions[each.kind], history)
        for each in history.events
        if each.kind in actions
    ]


def _encode_event(event: PoolEvent, action: str, history: PoolHistory) -> Entry:
    is_oom = event.kind is PoolEventKind.OUT_OF_MEMORY
    return {
        "action": action,
        # Free: of the budget there is no record, so what is reserved and not in use.
        **(
            {"device_free": event.reserved_bytes - event.in_use_bytes}
            if is_oom
            else {"addr": event.address}
        ),
        "size": event.requested_bytes if event.kind in _OF_BLOCKS else event.nbytes,
        "stream": event.stream,
        "time_us": (event.time_ns + history.wall_ns) // _NS_PER_US,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": _frames(event.label),
    }


def _encode_steps(history: PoolHistory) -> list[Entry]:
    """Return the ends of steps as annotations, which the web page draws on its time axis."""
    steps = [each for each in history.events if each.kind is PoolEventKind.STEP]
    found = []
    for number, each in enumerate(steps[1:], start=1):
        former = steps[number - 1]
        for stage, event in (("START", former), ("END", each)):
            found.append(
                {
                    "stage": stage,
                    "name": f"step {each.nbytes}",
                    "device": history.device_index,
                    "time_us": (event.time_ns + history.wall_ns) // _NS_PER_US,
                }
            )
    return found


def _frames(label: str) -> list[Entry]:
    return [{"filename": MODULE_FILE, "line": 0, "name": label}] if label else []
