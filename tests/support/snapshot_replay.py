"""Checks of a memory snapshot, as torch's web page reads it: from its end backwards."""

from __future__ import annotations

from typing import Any

ACTIVE = {"active_allocated", "active_pending_free"}
Span = tuple[int, int]


def check_snapshot(snapshot: dict[str, Any], device: int = 0) -> None:
    """Check that segments are tiled by blocks, and undo each event of the device.

    A state before an event must be possible: what was allocated was free, and what was mapped was
    mapped. Blocks whose allocation is in the history are gone in the end.
    """
    mapped: list[Span] = []
    blocks: dict[int, int] = {}  # address -> bytes, of those not free
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            if block["state"] in ACTIVE:
                blocks[address] = block["size"]
            address += block["size"]
        assert address - segment["address"] == segment["total_size"]
        mapped = add_span(mapped, (segment["address"], address))
    for event in reversed(snapshot["device_traces"][device]):
        if event["action"].startswith("segment"):
            mapped = undo_map(mapped, event)
        elif event["action"] != "oom":
            undo_use(blocks, event)
        for address, size in blocks.items():
            assert is_inside(mapped, (address, address + size)), (event, address)


def undo_use(blocks: dict[int, int], event: dict[str, Any]) -> None:
    """Undo an allocation or a free."""
    if event["action"] == "alloc":
        assert blocks.pop(event["addr"], 0) >= event["size"], event
    elif event["action"] == "free_completed":
        assert event["addr"] not in blocks, event
        blocks[event["addr"]] = event["size"]
    else:
        assert event["action"] == "free_requested"
        assert event["addr"] in blocks, event


def undo_map(mapped: list[Span], event: dict[str, Any]) -> list[Span]:
    """Undo a change of what is mapped."""
    span = event["addr"], event["addr"] + event["size"]
    is_new = event["action"] in {"segment_map", "segment_alloc"}
    return cut_span(mapped, span) if is_new else add_span(mapped, span)


def is_inside(spans: list[Span], span: Span) -> bool:
    """Return whether one span covers all of another."""
    return any(low <= span[0] and span[1] <= high for low, high in spans)


def add_span(spans: list[Span], span: Span) -> list[Span]:
    """Add a span that was not mapped, joined with its neighbours."""
    assert all(span[1] <= low or high <= span[0] for low, high in spans), (spans, span)
    joined: list[Span] = []
    for low, high in sorted([*spans, span]):
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def cut_span(spans: list[Span], span: Span) -> list[Span]:
    """Cut a span out of the one that has it."""
    assert is_inside(spans, span), (spans, span)
    left = []
    for low, high in spans:
        parts = [(low, min(high, span[0])), (max(low, span[1]), high)]
        left += [part for part in parts if part[0] < part[1]]
    return left
