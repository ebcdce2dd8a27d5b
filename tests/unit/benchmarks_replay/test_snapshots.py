"""Requests from torch's memory snapshots: sizes as asked, lives as recorded, no code run."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from torch.cuda import _memory_viz as viz

from benchmarks.replay.__main__ import main
from benchmarks.replay.allocations import Allocation, max_live_bytes
from benchmarks.replay.snapshots import read_snapshot
from swapkit.errors import InvalidDocument
from tests.unit.benchmarks_replay.values import moves_of

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
SIDE = 0x7F00  # a handle of a stream
FRAMES = [
    {"filename": "CUDACachingAllocator.cpp", "line": 1, "name": "malloc"},
    {"filename": "/srv/model.py", "line": 12, "name": "forward"},
]


def entry(action: str, address: int, nbytes: int, **more: Any) -> dict[str, Any]:
    """Return an entry of a history as torch 2.13 writes it."""
    return {
        "action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": 1,
        "frames": FRAMES, "pool_id": (0, 0), "compile_context": "N/A", "user_metadata": "", **more,
    }  # fmt: skip


def segment(address: int, blocks: list[tuple[int, int, str]], **more: Any) -> dict[str, Any]:
    """Return a segment with blocks `(bytes, requested, state)`, as torch 2.13 writes it."""
    records = []
    at = address
    for nbytes, requested, state in blocks:
        records.append(
            {"address": at, "size": nbytes, "requested_size": requested, "state": state,
             "frames": FRAMES}
        )  # fmt: skip
        at += nbytes
    active = sum(nbytes for nbytes, _, state in blocks if state != "inactive")
    return {
        "device": 0, "address": address, "total_size": at - address, "allocated_size": active,
        "active_size": active, "requested_size": active, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": records, **more,
    }  # fmt: skip


# A weight from before, a ring that begins in the middle of a step (OLD is only freed), a block that
# another stream still uses, one on another stream, and an out of memory.
WEIGHT, OLD, A, B, C = 0x100000, 0x200000, 0x300000, 0x400000, 0x500000
HISTORY = [
    entry("free_requested", OLD, 3 * MIB - 5),
    entry("free_completed", OLD, 3 * MIB - 5),
    entry("segment_alloc", A, 20 * MIB),
    entry("alloc", A, 5 * MIB + 1),
    entry("segment_map", C, 2 * MIB, stream=SIDE),
    entry("alloc", C, 700, stream=SIDE),
    entry("free_requested", A, 5 * MIB + 1),
    entry("alloc", B, 9),
    entry("free_completed", A, 5 * MIB + 1),
    {"action": "oom", "device_free": 0, "size": 1 << 40, "stream": 0, "time_us": 2, "frames": [],
     "pool_id": (0, 0)},
    entry("segment_unmap", C, 2 * MIB, stream=SIDE),
    entry("segment_free", OLD, 4 * MIB),
    entry("snapshot", 0, 0),
    entry("user_defined", 0, 0),
    entry("alloc", A, 4 * MIB),
    entry("free_requested", A, 4 * MIB),
]  # fmt: skip
SNAPSHOT: dict[str, Any] = {
    "segments": [
        segment(WEIGHT, [(MIB, MIB - 3, "active_allocated")]),
        segment(A, [(B - A, 4 * MIB, "active_pending_free"), (512, 9, "active_allocated")]),
        segment(C, [(1024, 700, "active_allocated"), (MIB, 0, "inactive")], stream=SIDE),
        segment(WEIGHT, [(512, 512, "active_allocated")], device=1),
    ],
    "device_traces": [HISTORY, []],
    "allocator_settings": {"expandable_segments": False},
    "external_annotations": [],
}


def write(folder: Path, content: object) -> Path:
    path = folder / "step.pickle"
    path.write_bytes(pickle.dumps(content))
    return path


def test_fixture_when_read_by_torch_then_it_is_a_snapshot() -> None:
    assert "5.0MiB" in viz.trace(SNAPSHOT)
    assert "active_allocated" in viz.memory(SNAPSHOT, format_flamegraph=str)
    assert "total_reserved" in viz.segsum(SNAPSHOT)
    assert "<script" in viz.trace_plot(SNAPSHOT)


def test_snapshot_when_read_then_requests_are_in_order(tmp_path: Path) -> None:
    trace = read_snapshot(write(tmp_path, SNAPSHOT))
    caller = "forward (model.py:12)"
    assert trace.blocks == (
        Allocation(nbytes=MIB - 3),
        Allocation(nbytes=3 * MIB - 5),
        Allocation(nbytes=5 * MIB + 1, label=caller),
        Allocation(nbytes=700, stream=1, label=caller),
        Allocation(nbytes=9, label=caller),
        Allocation(nbytes=4 * MIB, label=caller),
    )
    assert trace.present == 2
    assert trace.label == "step.pickle"


def test_block_when_a_stream_still_uses_it_then_it_ends_when_that_is_done(tmp_path: Path) -> None:
    trace = read_snapshot(write(tmp_path, SNAPSHOT))
    # Block 2 is given after block 4 is taken; block 5 waits when the history ends.
    assert moves_of(trace) == ["+0", "+1", "-1", "+2", "+3", "+4", "-2", "+5"]
    assert max_live_bytes(trace) == MIB - 3 + 5 * MIB + 1 + 700 + 9


def test_frees_when_only_requests_are_recorded_then_they_count(tmp_path: Path) -> None:
    history = [each for each in HISTORY if each["action"] != "free_completed"]
    trace = read_snapshot(write(tmp_path, SNAPSHOT | {"device_traces": [history]}))
    assert moves_of(trace) == ["+0", "+1", "-1", "+2", "+3", "-2", "+4", "+5", "-5"]


def test_address_when_allocated_again_without_a_free_then_the_first_life_ends(
    tmp_path: Path,
) -> None:
    history = [entry("alloc", A, 512), entry("alloc", A, 1024), entry("alloc", B, 0)]
    del history[0]["frames"]  # as without stacks
    trace = read_snapshot(write(tmp_path, SNAPSHOT | {"device_traces": [history], "segments": []}))
    assert moves_of(trace) == ["+0", "-0", "+1"]


def test_devices_when_several_then_one_has_to_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, SNAPSHOT | {"device_traces": [HISTORY, [entry("alloc", A, 100)]]})
    with pytest.raises(InvalidDocument, match=r"devices \[0, 1\] have a history: name one"):
        read_snapshot(path)
    trace = read_snapshot(path, device=1)
    assert [block.nbytes for block in trace.blocks] == [512, 100]


@pytest.mark.parametrize("content", [[], {"segments": []}])
def test_pickle_when_it_is_no_snapshot_then_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(InvalidDocument, match=r"step\.pickle: no snapshot of torch"):
        read_snapshot(write(tmp_path, content))


class Command:
    """Runs a command when it is unpickled by somebody careless."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_pickle_when_it_holds_code_then_refused_and_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, SNAPSHOT | {"external_annotations": [Command(tmp_path / "hit")]})
    with pytest.raises(InvalidDocument, match=r"does not refer to posix\.system"):
        read_snapshot(path)
    assert not (tmp_path / "hit").exists()


def test_command_when_given_a_snapshot_then_each_allocator_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, SNAPSHOT)
    main(["--snapshot", str(path), "--device", "0", "--budget", "20MiB"])
    said = capsys.readouterr().out
    assert "step.pickle: 6 blocks in 8 events" in said
    assert "within 20.00 MiB" in said
    rows = [line.split("  ")[0] for line in said.splitlines()]
    assert {"torch", "torch, expandable segments", "swapkit's pool"} <= set(rows)
    assert any(row.startswith("planned addresses") for row in rows)
