"""The requests in one of torch's memory snapshots, in the order in which torch was asked.

A block ends where its memory may serve another request (`free_completed`): behind the work of other
streams that use it. What was in use before the history begins is taken first: blocks that the
history frees and did not allocate, and those of `segments` that it does not mention. The history is
a ring, so it may begin in the middle of a step.

Source:
    torch/cuda/memory.py, `_snapshot`; torch/cuda/_memory_viz.py, `trace`.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from benchmarks.replay.allocations import Allocation, AllocationTrace
from swapkit.errors import InvalidDocument

if TYPE_CHECKING:
    from pathlib import Path

Entry: TypeAlias = "dict[str, Any]"

_FREES = {"free_completed", "free"}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler for containers, numbers and text; it refuses every class and function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise InvalidDocument(f"a memory snapshot does not refer to {module}.{name}")


def load_snapshot(path: Path) -> dict[str, Any]:
    """Return the content of a snapshot, without running code from the pickle.

    A pickle can be made to take any amount of memory: read only files that you trust.

    Raises:
        InvalidDocument: it refers to a class or a function, or is no snapshot.
    """
    with path.open("rb") as file:
        content = _PlainUnpickler(file).load()
    if not isinstance(content, dict) or "device_traces" not in content:
        raise InvalidDocument(f"{path}: no snapshot of torch.cuda.memory._dump_snapshot")
    return content


def read_snapshot(path: Path, *, device: int | None = None) -> AllocationTrace:
    """Read the requests of a snapshot as one step.

    Args:
        path: a pickle written by `torch.cuda.memory._dump_snapshot`.
        device: the device whose history to read; None: the only device that has one.

    Raises:
        InvalidDocument: it is no snapshot, or not one device is meant.
    """
    content = load_snapshot(path)
    traces = content["device_traces"]
    recorded = [number for number, trace in enumerate(traces) if trace]
    chosen = [number for number in recorded if device in {None, number}]
    if len(chosen) != 1:
        raise InvalidDocument(f"{path}: devices {recorded} have a history: name one of them")
    history = _History(traces[chosen[0]])
    for segment in content["segments"]:
        if segment["device"] == chosen[0]:
            history.add_segment(segment)
    return history.trace(path.name)


class _History:
    """Blocks and moves in order; blocks from before are numbered -1, -2, ... until the end."""

    def __init__(self, entries: list[Entry]) -> None:
        self._streams: dict[int, int] = {}  # torch's handle -> number
        self._before: list[Allocation] = []
        self._blocks: list[Allocation] = []
        self._moves: list[tuple[bool, int]] = []  # whether it is a take, and the block
        self._present: dict[int, int] = {}  # address -> block
        self._mentioned: set[int] = set()
        frees = _FREES & {entry["action"] for entry in entries} or {"free_requested"}
        for entry in entries:
            if entry["action"] == "alloc" and entry["size"]:
                self._take(entry)
            elif entry["action"] in frees and entry["size"]:
                if entry["addr"] not in self._present:
                    self._add_before(entry["addr"], entry["size"], entry["stream"])
                self._give(entry["addr"])

    def add_segment(self, segment: Entry) -> None:
        """Add the blocks in use in the end that the history does not mention."""
        address = segment["address"]
        for block in segment["blocks"]:
            nbytes = 0 if block["state"] == "inactive" else block["requested_size"]
            if nbytes and address not in self._mentioned:
                self._add_before(address, nbytes, segment["stream"])
            address += block["size"]

    def trace(self, label: str) -> AllocationTrace:
        """Return the trace."""
        count = len(self._before)
        moves = [
            number + count if is_take else ~(number + count) for is_take, number in self._moves
        ]
        return AllocationTrace(
            blocks=(*reversed(self._before), *self._blocks),
            moves=(*range(count), *moves),
            present=count,
            label=label,
        )

    def _take(self, entry: Entry) -> None:
        if entry["addr"] in self._present:  # its free is missing
            self._give(entry["addr"])
        self._present[entry["addr"]] = len(self._blocks)
        self._mentioned.add(entry["addr"])
        self._moves.append((True, len(self._blocks)))
        label = _find_caller(entry.get("frames", []))  # none: recorded without stacks
        self._blocks.append(self._make(entry["size"], entry["stream"], label))

    def _give(self, address: int) -> None:
        self._moves.append((False, self._present.pop(address)))

    def _add_before(self, address: int, nbytes: int, stream: int) -> None:
        self._before.append(self._make(nbytes, stream, ""))
        self._present[address] = -len(self._before)
        self._mentioned.add(address)

    def _make(self, nbytes: int, stream: int, label: str) -> Allocation:
        number = self._streams.setdefault(stream, len(self._streams))
        return Allocation(nbytes=nbytes, stream=number, label=label)


def _find_caller(frames: list[Entry]) -> str:
    """Return the innermost Python function of a stack; empty: there is none."""
    for frame in frames:
        if frame["filename"].endswith(".py"):
            return f"{frame['name']} ({frame['filename'].rsplit('/', 1)[-1]}:{frame['line']})"
    return ""
