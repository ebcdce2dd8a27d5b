"""Documents of traces, machines and plans: what is written can be read, all else is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.errors import InvalidDocument
from swapkit.ir import codec
from swapkit.ir.documents import parse_document
from swapkit.ir.fields import SHAPES
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Operator, Phase, Storage, Trace
from tests.unit.ir.values import DECODERS, DOCUMENTS, MACHINE, PLAN, TRACE, VALUES

if TYPE_CHECKING:
    from pathlib import Path


def edited(kind: str, path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Return a document in which one place has another value."""
    document = copy.deepcopy(DOCUMENTS[kind])
    inner: Any = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return document


def message_of(kind: str, document: object) -> str:
    with pytest.raises(InvalidDocument) as caught:
        DECODERS[kind](document)
    return str(caught.value)


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_value_when_encoded_and_decoded_then_equal(kind: str) -> None:
    text = json.dumps(DOCUMENTS[kind], allow_nan=False)
    assert DECODERS[kind](json.loads(text)) == VALUES[kind]


def test_values_when_written_and_read_then_equal(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    codec.write_trace(path, TRACE)
    assert codec.read_trace(path) == TRACE
    codec.write_machine(path, MACHINE)
    assert codec.read_machine(path) == MACHINE
    codec.write_plan(str(path), PLAN)
    assert codec.read_plan(str(path)) == PLAN
    codec.write_planned(path, TRACE, PLAN)
    assert codec.read_planned(path) == (TRACE, PLAN)
    assert [each.name for each in tmp_path.iterdir()] == ["value.json"]


def test_plan_when_without_prediction_then_equal() -> None:
    plan = Plan(decisions=(), budget_bytes=1)
    assert codec.decode_plan(codec.encode_plan(plan)) == plan


def test_machine_when_host_unlimited_then_equal() -> None:
    machine = Machine(budget_bytes=1, out_bytes_per_second=1.0, in_bytes_per_second=1.0)
    assert codec.decode_machine(codec.encode_machine(machine)) == machine


def test_trace_when_written_then_a_line_for_each_row(tmp_path: Path) -> None:
    codec.write_trace(tmp_path / "trace.json", TRACE)
    lines = (tmp_path / "trace.json").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if "mm_backward" in line]
    assert json.loads(row.rstrip(",")) == DOCUMENTS["trace"]["operators"]["rows"][3]
    assert any("Bündel" in line for line in lines)


@pytest.mark.parametrize("kind", list(SHAPES))
def test_shape_when_compared_then_has_every_plain_field(kind: type) -> None:
    parts = {"version", "operators", "storages", "events", "decisions", "prediction", "trace"}
    parts -= set() if kind in {Trace, Plan, Machine} else parts
    parts |= {"host", "host_seconds", "reserved_bytes", "place"}  # of one session
    assert set(SHAPES[kind].rules) == {field.name for field in dataclasses.fields(kind)} - parts


def test_rows_when_fields_are_in_another_order_then_equal() -> None:
    table = DOCUMENTS["trace"]["operators"]
    turned = {"fields": table["fields"][::-1], "rows": [row[::-1] for row in table["rows"]]}
    assert codec.decode_trace(edited("trace", ("operators",), turned)) == TRACE


def test_column_when_no_row_needs_it_then_left_out_and_read_again() -> None:
    first, *others = TRACE.storages
    plain = codec._encode_table(TRACE.storages, Storage)
    continued = (first, *(dataclasses.replace(each, continues=0) for each in others))
    table = codec._encode_table(continued, Storage)
    assert table["fields"] == [*plain["fields"], "continues"]  # type: ignore[misc]
    assert codec._decode_table("storages", plain, Storage) == TRACE.storages
    assert codec._decode_table("storages", table, Storage) == continued


@pytest.mark.parametrize(
    ("kind", "path", "value", "where", "expected"),
    [
        ("trace", ("operators", "rows", 2, 1), "x", "operators[2].seconds:", "at least 0, got 'x'"),
        ("trace", ("operators", "rows", 2, 1), math.nan, "operators[2].seconds:", "got nan"),
        ("trace", ("operators", "rows", 2, 1), math.inf, "operators[2].seconds:", "got inf"),
        ("trace", ("operators", "rows", 2, 1), -1, "operators[2].seconds:", "got -1"),
        ("trace", ("operators", "rows", 2, 1), 10**400, "operators[2].seconds:", "at least 0"),
        ("trace", ("operators", "rows", 2, 1), True, "operators[2].seconds:", "got True"),
        ("trace", ("operators", "rows", 0, 2), "back", "operators[0].phase:", "'idle', got 'back'"),
        ("trace", ("operators", "rows", 0, 2), [], "operators[0].phase:", "got []"),
        ("trace", ("operators", "rows", 0, 6), [9], "operators[0].reads:", "below 4, got 9"),
        ("trace", ("operators", "rows", 0, 6), [-1], "operators[0].reads:", "got (-1,)"),
        ("trace", ("operators", "rows", 0, 6), [2], "operators[0].reads:", "alive at this"),
        ("trace", ("operators", "rows", 0, 8), 1 << 61, "operators[0].workspace_bytes:", "from 0"),
        ("trace", ("operators", "rows", 0, 9), 1, "operators[0].is_repeatable:", "true or false"),
        ("trace", ("operators", "rows", 0, 0), "\ud800", "operators[0].name:", "expected text"),
        ("trace", ("operators", "rows", 0), [], "operators[0]:", "10 values, got []"),
        ("trace", ("operators", "rows", 0), 5, "operators[0]:", "10 values, got 5"),
        ("trace", ("operators", "rows"), {}, "operators.rows:", "a list of rows, got {}"),
        ("trace", ("operators", "rows"), [], "operators:", "at least one"),
        ("trace", ("operators", "fields", 0), "nom", "operators.fields:", "'name', 'seconds'"),
        ("trace", ("operators", "fields", 0), "seconds", "operators.fields:", "once"),
        ("trace", ("operators", "fields", 0), {}, "operators.fields:", "once"),
        ("trace", ("operators",), 3, "operators:", "an object, got 3"),
        ("trace", ("storages", "rows", 1, 2), 9, "storages[1].birth:", "from -1 to 4, got 9"),
        ("trace", ("storages", "rows", 1, 3), 6, "storages[1].death:", "from 0 to 5, got 6"),
        ("trace", ("storages", "rows", 2, 3), 0, "storages[2].death:", "from 1 to 5, got 0"),
        ("trace", ("storages", "rows", 0, 0), 1.5, "storages[0].nbytes:", "got 1.5"),
        ("trace", ("storages", "rows", 0, 0), True, "storages[0].nbytes:", "got True"),
        ("trace", ("events", "rows", 1, 2), 5, "events[1].operator:", "from operator 0 until"),
        ("trace", ("events", "rows", 2, 2), 0, "events[2].operator:", "from 1 to 5, got 0"),
        ("trace", ("events", "rows", 1, 0), "use", "events[1].storage:", "an earlier event saved"),
        ("trace", ("events", "rows", 1, 1), 4, "events[1].storage:", "below 4, got 4"),
        ("trace", ("label",), None, "label:", "expected text, got None"),
        ("trace", ("version",), 2, "version:", "2 is newer"),
        ("trace", ("version",), 0, "version:", "from 1 to 1, got 0"),
        ("trace", ("version",), "1", "version:", "got '1'"),
        ("trace", ("format",), "swapkit plan", "format:", "'swapkit trace', got 'swapkit plan'"),
        ("trace", ("colour",), 1, "document:", "got 'colour'"),
        ("machine", ("duplex",), 2.5, "duplex:", "from 1 to 2, got 2.5"),
        ("machine", ("out_bytes_per_second",), 0, "out_bytes_per_second:", "from 1 to"),
        ("machine", ("host_bytes",), -1, "host_bytes:", "or nothing, got -1"),
        ("machine", ("disk_read_bytes_per_second",), 0, "disk_read_bytes_per", "there is a disk"),
        ("plan", ("decisions", "rows", 0, 1), "burn", "decisions[0].action:", "'swap', 'rec"),
        ("plan", ("decisions", "rows", 1, 0), 1, "decisions[1].storage:", "one decision"),
        ("plan", ("decisions", "rows", 1, 3), 1, "decisions[1].release:", "not swapped, got 1"),
        ("plan", ("decisions", "rows", 1, 2), "disk", "decisions[1].tier:", "not swapped"),
        ("planned", ("plan", "decisions", "rows", 0, 4), 1, "plan.decisions[0].prefetch", "got 1"),
        ("plan", ("prediction", "seconds"), None, "prediction.seconds:", "got None"),
        ("plan", ("prediction",), [], "prediction:", "an object, got []"),
        ("plan", ("bound_seconds",), "low", "bound_seconds:", "or nothing, got 'low'"),
        ("planned", ("trace", "base_bytes"), -1, "trace.base_bytes:", "got -1"),
        ("planned", ("plan", "budget_bytes"), -1, "plan.budget_bytes:", "got -1"),
        ("planned", ("plan", "signature"), "x", "plan.signature:", "'abc', the signature"),
        ("planned", ("plan", "decisions", "rows", 0, 0), 4, "plan.decisions[0].storage:", "got 4"),
        ("planned", ("plan", "decisions", "rows", 0, 4), 5, "plan.decisions[0].prefetch", "got 5"),
    ],
)  # fmt: skip
def test_document_when_one_value_is_wrong_then_says_where(
    kind: str, path: tuple[str | int, ...], value: object, where: str, expected: str
) -> None:
    message = message_of(kind, edited(kind, path, value))
    assert message.startswith(where)
    assert expected in message


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_document_when_a_field_is_missing_then_named(kind: str) -> None:
    for field in set(DOCUMENTS[kind]) - {"format", "version"}:
        document = {name: each for name, each in DOCUMENTS[kind].items() if name != field}
        assert f"{field!r} is missing" in message_of(kind, document)


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
@pytest.mark.parametrize("document", [None, 3, "text", [], {}, True, [1, {}]])
def test_document_when_something_else_then_refused(kind: str, document: object) -> None:
    assert "expected" in message_of(kind, document)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "invalid JSON at line 1, column 1"),
        (b'{"format": "swapkit trace",\n  "version"', "invalid JSON at line 2"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b'{"a": NaN}', "finite numbers, got NaN"),
        (b'{"a": -Infinity}', "finite numbers, got -Infinity"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"9" * 10_000, "cannot be read as JSON"),
    ],
)
def test_file_when_garbage_then_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "garbage.json"
    path.write_bytes(content)
    for read in (codec.read_trace, codec.read_machine, codec.read_plan, codec.read_planned):
        with pytest.raises(InvalidDocument) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert expected in str(caught.value)


def test_file_when_cut_anywhere_then_refused(tmp_path: Path) -> None:
    codec.write_planned(tmp_path / "whole.json", TRACE, PLAN)
    content = (tmp_path / "whole.json").read_bytes().rstrip()
    for length in range(len(content)):
        with pytest.raises(InvalidDocument):
            codec.decode_planned(parse_document(content[:length]))


def test_number_when_too_large_for_a_float_then_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    codec.write_trace(path, TRACE)
    path.write_text(path.read_text().replace("1.25e-07", "1e999"), encoding="utf-8")
    with pytest.raises(InvalidDocument, match=r"operators\[3\]\.seconds: .* got inf"):
        codec.read_trace(path)


def test_file_when_missing_then_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        codec.read_plan(tmp_path / "none.json")


def test_file_when_writing_fails_then_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    codec.write_plan(path, PLAN)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swapkit.ir.documents.os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        codec.write_plan(path, dataclasses.replace(PLAN, policy="other"))
    assert codec.read_plan(path) == PLAN
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_file_when_a_link_then_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    codec.write_plan(tmp_path / "link.json", PLAN)
    assert (tmp_path / "link.json").is_symlink()
    assert codec.read_plan(tmp_path / "plan.json") == PLAN


def test_unsound_value_when_written_then_refused_and_nothing_is_there(tmp_path: Path) -> None:
    broken = Operator(name="x", seconds=math.nan, phase=Phase.FORWARD)
    with pytest.raises(InvalidDocument, match=r"operators\[0\]\.seconds"):
        codec.write_trace(tmp_path / "x.json", dataclasses.replace(TRACE, operators=(broken,)))
    with pytest.raises(InvalidDocument, match="signature"):
        codec.write_planned(tmp_path / "x.json", TRACE, dataclasses.replace(PLAN, signature="no"))
    assert not list(tmp_path.iterdir())


def test_trace_when_written_before_it_knew_its_ranks_then_read_and_they_are_unknown() -> None:
    known = dataclasses.replace(TRACE, ranks=4)
    document: dict[str, Any] = codec.encode_trace(known)
    assert document["ranks"] == 4
    assert codec.decode_trace(document) == known
    del document["ranks"]
    assert codec.decode_trace(document).ranks is None
    assert "ranks" not in codec.encode_trace(TRACE)
    with pytest.raises(InvalidDocument, match="ranks"):
        codec.decode_trace({**document, "ranks": 0})
