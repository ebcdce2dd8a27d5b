"""The memory that operators take while they run, read from the pool's events."""

from __future__ import annotations

import pytest

from swapkit._native.pool import RingEvent, RingKind
from swapkit._runtime.recording.tables import blocks as tables
from swapkit._runtime.recording.tables.blocks import Blocks, Workspaces


class FakeRing:
    """A ring with given events."""

    def __init__(self, events: list[RingEvent]) -> None:
        self.events = events

    def read(self) -> tuple[list[RingEvent], int]:
        return self.events, 0


def ring_event(kind: RingKind, nbytes: int, in_use_bytes: int) -> RingEvent:
    return RingEvent(
        time_ns=0,
        kind=kind,
        nbytes=nbytes,
        in_use_bytes=in_use_bytes,
        reserved_bytes=in_use_bytes,
        tag=0,
    )


@pytest.mark.parametrize("rescued", [0, 30, 80])
def test_workspace_when_a_rescue_frees_memory_inside_then_that_is_not_counted(rescued: int) -> None:
    made, workspace, before = 10, 40, 100
    events = [ring_event(RingKind.OP_BEGIN, tables._OURS, before)]
    if rescued:
        events.append(ring_event(RingKind.GIVE, rescued, before - rescued))
        events.append(ring_event(RingKind.RESCUE, rescued, before - rescued))
    level = before - rescued
    events += [
        ring_event(RingKind.TAKE, made, level + made),
        ring_event(RingKind.TAKE, workspace, level + made + workspace),
        ring_event(RingKind.GIVE, workspace, level + made),
        ring_event(RingKind.OP_END, tables._OURS, level + made),
    ]
    workspaces = Workspaces(None, Blocks(lambda: 0))
    workspaces.blocks.is_whole = True
    workspaces._ring = FakeRing(events)  # type: ignore[assignment]
    workspaces.read()
    assert workspaces.bytes_of(0) == workspace
    assert workspaces.peaks == [before + made + workspace]
