"""Files that can be replayed: each kind is recognised, anything else is refused with a reason."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from swapkit.errors import InvalidArgument, InvalidDocument
from swapkit.ir import codec
from swapkit.ir.allocations import allocations_of_step, max_live_bytes
from swapkit.replay.reading import read_replayable
from tests.unit.ir.test_snapshot_allocations import SNAPSHOT
from tests.unit.ir.values import ALLOCATIONS, MACHINE, PLAN, TRACE

if TYPE_CHECKING:
    from pathlib import Path


def test_documents_when_read_then_as_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    codec.write_allocations(path, ALLOCATIONS)
    assert read_replayable(str(path)) == ALLOCATIONS
    codec.write_trace(path, TRACE)
    assert read_replayable(str(path)) == allocations_of_step(TRACE)
    codec.write_planned(path, TRACE, PLAN)
    assert read_replayable(str(path)) == allocations_of_step(TRACE)


def test_snapshot_when_read_then_of_the_chosen_device(tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    assert read_replayable(str(path)).present == 2
    assert read_replayable(str(path), device=0).present == 2
    with pytest.raises(InvalidDocument, match="device: expected a device with a history"):
        read_replayable(str(path), device=1)


def test_table_when_read_then_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "lives.csv"
    path.write_text("id,lower,upper,size\n7,3,9,100\n8,0,3,50\n9,4,5,60\n", encoding="utf-8")
    trace = read_replayable(str(path))
    assert [block.nbytes for block in trace.blocks] == [50, 100, 60]
    assert (max_live_bytes(trace), trace.label) == (160, "lives.csv")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "neither a snapshot, nor a JSON document, nor a table with the columns"),
        (b"id,size\n1,2\n", "the first line is 'id,size'"),
        (b"lower,upper,size\n1,2\n", "cannot be read as a table of whole numbers"),
        (b"lower,upper,size\n1,2,x\n", "cannot be read as a table of whole numbers"),
        (b"lower,upper,size\n2,2,5\n", r"intervals\[0\]: expected a start before the end"),
        (b"\xff\xfe", "neither a snapshot nor text"),
        (b"{", "invalid JSON"),
        (b"{}", "format: expected 'swapkit allocations', 'swapkit trace' or"),
        (b"[1]", "format: expected"),
        (b"\x80\x04]", "not a pickle of a memory snapshot"),
    ],
)
def test_file_when_none_of_these_then_says_why(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InvalidDocument, match=expected) as caught:
        read_replayable(str(path))
    assert str(path) in str(caught.value)


def test_machine_when_read_then_its_format_is_named(tmp_path: Path) -> None:
    codec.write_machine(tmp_path / "machine.json", MACHINE)
    with pytest.raises(InvalidDocument, match="got 'swapkit machine'"):
        read_replayable(str(tmp_path / "machine.json"))


def test_device_when_the_file_is_no_snapshot_then_refused(tmp_path: Path) -> None:
    codec.write_allocations(tmp_path / "trace.json", ALLOCATIONS)
    with pytest.raises(InvalidArgument, match=r"--device 1: .* has one device"):
        read_replayable(str(tmp_path / "trace.json"), device=1)
