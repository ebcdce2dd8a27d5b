"""Allocation traces from torch's memory snapshots, in the order in which torch was asked.

An entry of a snapshot's history has the requested bytes. A block ends where its memory may serve
another request (`free_completed`): behind the work of other streams that use it. What was in use
before the history begins is taken first: blocks that the history frees and did not allocate, and
those of `segments` that it does not mention. The history is a ring, so it may begin in the middle
of a step.

Source:
    torch/cuda/memory.py, `_snapshot`; torch/cuda/_memory_viz.py, `trace`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from swapkit.errors import InvalidDocument
from swapkit.ir.allocations import (
    Allocation,
    AllocationEvent,
    AllocationEventKind,
    AllocationTrace,
)
from swapkit.ir.snapshot_files import FREES, REQUESTS, load_snapshot

if TYPE_CHECKING:
    from swapkit.ir.snapshot_files import Snapshot, SnapshotEntry


def read_snapshot_allocations(
    path: str | os.PathLike[str], *, device: int | None = None
) -> AllocationTrace:
    """Read the requests of a torch memory snapshot, without running code from the pickle.

    Args:
        path: a pickle written by `torch.cuda.memory._dump_snapshot`.
        device: the device whose history to read; None: the only device that has one.

    Raises:
        InvalidDocument: the file is not such a snapshot, has no history, or has the history of
            several devices and `device` is None.
        OSError: the file cannot be read.
    """
    snapshot = load_snapshot(path, device=device)
    history = _History(snapshot)
    for entry in snapshot.entries:
        history.add(entry)
    trace = history.trace(os.path.basename(os.fspath(path)))
    if not trace.blocks:
        raise InvalidDocument(f"{os.fspath(path)}: the history has no allocation")
    return trace


class _History:
    """The blocks and events so far; blocks are numbered anew in the end, those before first."""

    def __init__(self, snapshot: Snapshot) -> None:
        actions = {entry.action for entry in snapshot.entries}
        self._frees = FREES if actions.intersection(FREES) else REQUESTS
        self._at_end = snapshot.blocks
        self._streams: dict[int, int] = {}  # torch's handle -> number
        self._before: list[Allocation] = []
        self._blocks: list[Allocation] = []
        # A number of at least 0 is a block of `_blocks`; -1, -2, ... is one of `_before`.
        self._events: list[tuple[AllocationEventKind, int]] = []
        self._present: dict[int, int] = {}  # address -> number
        self._mentioned: set[int] = set()

    def add(self, entry: SnapshotEntry) -> None:
        """Add one entry; ignore those that are neither an allocation nor a free."""
        if entry.action == "alloc":
            if entry.address in self._present:  # its free is missing
                self._give(entry.address)
            if entry.nbytes == 0:
                return
            self._present[entry.address] = len(self._blocks)
            self._mentioned.add(entry.address)
            self._events.append((AllocationEventKind.TAKE, len(self._blocks)))
            self._blocks.append(self._make(entry.nbytes, entry.stream, entry.caller))
        elif entry.action in self._frees and entry.nbytes:
            if entry.address not in self._present:
                self._add_before(entry.address, entry.nbytes, entry.stream)
            self._give(entry.address)

    def trace(self, label: str) -> AllocationTrace:
        """Return the trace, with the blocks that the history does not mention."""
        for address, block in self._at_end.items():
            if address not in self._mentioned and block.requested_bytes:
                self._add_before(address, block.requested_bytes, block.stream)
        count = len(self._before)
        events = [(AllocationEventKind.TAKE, number - count) for number in range(count)]
        return AllocationTrace(
            blocks=(*reversed(self._before), *self._blocks),
            events=tuple(
                AllocationEvent(kind=kind, block=number + count)
                for kind, number in (*events, *self._events)
            ),
            present=count,
            device="cuda",
            label=label,
        )

    def _add_before(self, address: int, nbytes: int, stream: int) -> None:
        self._before.append(self._make(nbytes, stream, ""))
        self._present[address] = -len(self._before)
        self._mentioned.add(address)

    def _give(self, address: int) -> None:
        self._events.append((AllocationEventKind.GIVE, self._present.pop(address)))

    def _make(self, nbytes: int, stream: int, caller: str) -> Allocation:
        number = self._streams.setdefault(stream, len(self._streams))
        return Allocation(nbytes=nbytes, stream=number, label=caller)
