"""Torch's memory snapshots as traces: what they say is kept, what they hold is not run."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.pipelines.snapshots import read_snapshot
from swapkit.errors import InvalidDocument
from swapkit.ir.snapshot_files import decode_snapshot, unpickle_plain
from swapkit.ir.traces import BEFORE, Kind, Phase, Storage

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
FRAMES = [
    {"filename": "/pytorch/c10/core/StorageImpl.cpp", "line": 1, "name": "c10::StorageImpl"},
    {"filename": "/srv/model.py", "line": 12, "name": "forward"},
    {"filename": "/srv/train.py", "line": 3, "name": "<module>"},
]


def entry(action: str, address: int, nbytes: int, time_us: int, **more: Any) -> dict[str, Any]:
    """Return an entry as torch 2.13 has it."""
    return {
        "action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_us,
        "compile_context": "N/A", "user_metadata": "", "frames": [], "pool_id": (0, 0), **more,
    }  # fmt: skip


def freed(address: int, nbytes: int, time_us: int) -> list[dict[str, Any]]:
    return [
        entry(action, address, nbytes, time_us) for action in ("free_requested", "free_completed")
    ]


# Two activations, a temporary at the peak, a gradient; A is freed before B.
A, B, TEMPORARY, GRADIENT, OLD, WEIGHT = 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000
STEP = [
    entry("segment_alloc", 0x1000, 20 * MIB, 90),
    entry("alloc", A, 4 * MIB, 100, frames=FRAMES),
    entry("alloc", B, 2 * MIB - 1, 200),
    *freed(OLD, MIB, 250),
    entry("alloc", TEMPORARY, 8 * MIB, 300),
    entry("snapshot", 0, 0, 300),
    *freed(TEMPORARY, 8 * MIB, 400),
    entry("alloc", GRADIENT, MIB, 500),
    *freed(B, 2 * MIB - 1, 600),
    entry("alloc", TEMPORARY, 512, 700),
    *freed(A, 4 * MIB, 800),
    *freed(TEMPORARY, 512, 900),
    entry("segment_free", 0x9000, 10 * MIB, 950),
]


def snapshot_of(*traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a snapshot with a segment on device 0 in which a weight and the gradient are left."""
    blocks = [
        {"size": GRADIENT - A, "requested_size": 0, "state": "inactive", "frames": []},
        {"size": WEIGHT - GRADIENT, "requested_size": MIB, "state": "active_allocated"},
        {"size": 3 * MIB, "requested_size": 3 * MIB, "state": "active_allocated"},
    ]
    segment = {
        "device": 0, "address": A, "total_size": 20 * MIB, "stream": 0, "blocks": blocks,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
    }  # fmt: skip
    return {
        "segments": [segment, segment | {"device": 1, "address": 0x7000, "total_size": 1}],
        "device_traces": list(traces),
        "allocator_settings": {"expandable_segments": False},
    }


def write(folder: Path, content: object) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    return path


def test_snapshot_when_read_then_storages_live_as_recorded(tmp_path: Path) -> None:
    trace = read_snapshot(write(tmp_path, snapshot_of(STEP)))
    assert trace.storages == (
        Storage(nbytes=4 * MIB, birth=0, death=8, is_saved=True),
        Storage(nbytes=2 * MIB, birth=1, death=6, is_saved=True),
        Storage(nbytes=MIB, birth=BEFORE, death=2),
        Storage(nbytes=8 * MIB, birth=3, death=4),
        Storage(nbytes=MIB, birth=5, death=9),
        Storage(nbytes=512, birth=7, death=8),
    )  # fmt: skip
    assert {storage.kind for storage in trace.storages} == {Kind.ACTIVATION}
    assert trace.base_bytes == 3 * MIB  # the weight, but not the gradient
    assert trace.device == "cuda"
    # At most 30 MiB, before the last segment was given back; in use at the peak: 17 MiB.
    assert trace.reserved_ratio == pytest.approx(30 / 17)


def test_snapshot_when_read_then_operators_are_the_times_between(tmp_path: Path) -> None:
    trace = read_snapshot(write(tmp_path, snapshot_of(STEP)))
    micros = [round(operator.seconds * 1e6) for operator in trace.operators]
    assert micros == [100, 50, 50, 100, 100, 100, 100, 100, 0]
    assert trace.operators[0].name == "forward (model.py:12)"
    assert [operator.name for operator in trace.operators[1:4]] == ["alloc", "free", "alloc"]
    phases = [operator.phase for operator in trace.operators]
    assert phases == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 5


def test_snapshot_when_read_then_saved_ones_are_idle_at_the_peak(tmp_path: Path) -> None:
    trace = read_snapshot(write(tmp_path, snapshot_of(STEP)))
    reads = {number: each.reads for number, each in enumerate(trace.operators) if each.reads}
    assert reads == {1: (0,), 2: (1,), 5: (1,), 7: (0,)}
    writes = {number: each.writes for number, each in enumerate(trace.operators) if each.writes}
    assert writes == {0: (0,), 1: (1,), 3: (3,), 5: (4,), 7: (5,)}
    assert not any(operator.is_repeatable for operator in trace.operators)


def test_large_bytes_when_given_then_smaller_ones_are_not_saved(tmp_path: Path) -> None:
    trace = read_snapshot(write(tmp_path, snapshot_of(STEP)), large_bytes=3 * MIB)
    saved = [number for number, each in enumerate(trace.storages) if each.is_saved]
    assert saved == [0]


def test_frees_when_only_requests_are_recorded_then_they_count(tmp_path: Path) -> None:
    requests = [each for each in STEP if each["action"] != "free_completed"]
    trace = read_snapshot(write(tmp_path, snapshot_of(requests)))
    assert trace == read_snapshot(write(tmp_path, snapshot_of(STEP)))


def test_address_when_allocated_again_without_a_free_then_the_first_life_ends(
    tmp_path: Path,
) -> None:
    steps = [entry("alloc", A, 512, 1), entry("alloc", B, 512, 2), entry("alloc", A, 512, 3)]
    trace = read_snapshot(write(tmp_path, snapshot_of([*steps, *freed(B, 512, 5)])))
    assert [(each.birth, each.death) for each in trace.storages] == [(0, 2), (1, 3), (2, 4)]


def test_times_when_there_are_none_then_zero(tmp_path: Path) -> None:
    bare = [{key: each[key] for key in ("action", "addr", "size")} for each in STEP]
    trace = read_snapshot(write(tmp_path, {"device_traces": [bare]}))
    assert trace.seconds == 0
    assert len(trace.operators) == 9
    assert trace.base_bytes == 0


def test_devices_when_several_then_one_has_to_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot_of(STEP, [entry("alloc", A, 512, 1)], []))
    with pytest.raises(InvalidDocument, match=r"devices \[0, 1\] have a history; pass device="):
        read_snapshot(path)
    assert len(read_snapshot(path, device=0).operators) == 9
    assert len(read_snapshot(path, device=1).operators) == 1
    with pytest.raises(InvalidDocument, match=r"device: expected .* one of \[0, 1\], got 2"):
        read_snapshot(path, device=2)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], "snapshot: expected a dict"),
        ({"segments": []}, "device_traces: expected a list, got None"),
        ({"device_traces": [[], []]}, r"no device has a history; call torch\.cuda\.memory\._rec"),
        ({"device_traces": [[entry("oom", 0, 1, 1)]]}, "the history has no allocation"),
        ({"device_traces": [[3]]}, r"device_traces\[0\]\[0\]: expected a dict, got 3"),
        ({"device_traces": [[{"action": 1}]]}, r"device_traces\[0\]\[0\]\.action: .*got 1"),
        (
            {"device_traces": [[entry("alloc", -1, 1, 1)]]},
            r"device_traces\[0\]\[0\]\.addr: expected a whole number from 0 .*got -1",
        ),
        ({"device_traces": [[entry("alloc", 1, 1.5, 1)]]}, r"\.size: .*got 1\.5"),  # type: ignore[arg-type]
        ({"device_traces": [[entry("alloc", 1, 1 << 61, 1)]]}, r"\.size: expected"),
        ({"device_traces": [[entry("alloc", 1, 1, -1)]]}, r"\.time_us: .*got -1"),
        ({"device_traces": [STEP], "segments": [3]}, r"segments\[0\]: expected a dict, got 3"),
        ({"device_traces": [STEP], "segments": [{}]}, r"segments\[0\]\.total_size: .*got None"),
    ],
)
def test_snapshot_when_malformed_then_says_where(
    tmp_path: Path, content: object, expected: str
) -> None:
    with pytest.raises(InvalidDocument, match=expected) as caught:
        read_snapshot(write(tmp_path, content))
    assert str(caught.value).startswith(f"{tmp_path}/snapshot.pickle: ")


class Bomb:
    """Runs a command when it is unpickled by somebody careless."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_pickle_when_it_holds_code_then_refused_and_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, {"device_traces": [[Bomb(tmp_path / "hit")]]})
    with pytest.raises(InvalidDocument, match=r"refers to 'posix'\.'system'"):
        read_snapshot(path)
    assert not (tmp_path / "hit").exists()


def test_pickle_when_it_holds_another_class_then_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"'collections'\.'OrderedDict'"):
        read_snapshot(write(tmp_path, OrderedDict(device_traces=[])))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_when_cut_anywhere_then_refused(protocol: int) -> None:
    content = pickle.dumps(snapshot_of(STEP[:4]), protocol=protocol)
    for length in range(len(content)):
        with pytest.raises(InvalidDocument, match="not a pickle of a memory snapshot"):
            unpickle_plain(io.BytesIO(content[:length]))


@pytest.mark.parametrize(
    "content",
    [
        b"no pickle",
        b"\x80\x63",  # a protocol that does not exist
        b"\x80\x02K\x01K\x02s.",  # an item set in a number
        b"\x80\x02K\x01}b.",  # the state of a number
        b"\x80\x02]]s.",
        b"\x80\x02h\x07.",  # nothing is memoised
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02U\x01xQ.",  # a persistent id
        b"I1e5\n.",
        b"(" * 10**5 + b"l" * 10**5 + b".",
    ],
)
def test_pickle_when_garbage_then_refused(content: bytes) -> None:
    with pytest.raises(InvalidDocument):
        decode_snapshot(unpickle_plain(io.BytesIO(content)))


def test_snapshot_when_missing_then_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "none.pickle")
