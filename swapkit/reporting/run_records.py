"""A session as one value and one JSON document, from which its report is drawn, now or elsewhere.

The document has the formats of its trace, plan and machine inside. All content that is read is
checked: a document yields a sound record or an InvalidDocument that says where and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from swapkit.errors import InvalidDocument
from swapkit.ir import codec
from swapkit.ir.checks import check_plan
from swapkit.ir.documents import read_document, write_document
from swapkit.ir.fields import MOST_SECONDS, TEXT, Flag, Many, Number, Optional, Rule, Whole, refuse
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.ir.traces import Trace
from swapkit.planning.search.solving import TradeOff

Value = TypeVar("Value")
FORMAT, VERSION = "swapkit run", 1
_MOST_COUNT = 1 << 62  # counters of a long run exceed 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a session did so far, and why.

    Args:
        created: date and time in ISO 8601.
        swapkit_version: of the program that trained.
        torch_version: of the program that trained.
        device: its name for torch, such as `"cuda:0"`.
        hardware: its name for people; empty: unknown.
        policy: the name of the policy for plans.
        stage: `"warmup"`, `"search"` or `"stable"`.
        is_ended: whether the session has ended.
        stats: the statistics.
        steps: the latest steps, oldest first.
        pace: measured step time / time of the recorded or simulated step.
        plan_text: the plan in one line; empty: there is none.
        why_no_plan: why there is no plan and will be none; else empty.
        notes: sentences about replans, waits, planned addresses, threads.
        trace: the recorded step that the plan is for; None: no step was recorded.
        plan: None: there is none.
        machine: that the plan is for; None: not measured.
        trade_offs: the predicted step for other budgets, from the smallest to the largest. Their
            times are not yet multiplied by `pace`.
    """

    created: str
    swapkit_version: str
    torch_version: str
    device: str
    hardware: str
    policy: str
    stage: str
    is_ended: bool
    stats: SessionStats
    steps: tuple[StepRecord, ...] = ()
    pace: float = 1.0
    plan_text: str = ""
    why_no_plan: str = ""
    notes: tuple[str, ...] = ()
    trace: Trace | None = None
    plan: Plan | None = None
    machine: Machine | None = None
    trade_offs: tuple[TradeOff, ...] = ()


_OF_TYPES: dict[str, Rule] = {
    "str": TEXT,
    "bool": Flag(),
    "int": Whole(0, _MOST_COUNT),
    "int | None": Optional(Whole(0, _MOST_COUNT)),
    "float": Number(0.0, MOST_SECONDS),
    "float | None": Optional(Number(0.0, MOST_SECONDS)),
    "tuple[str, ...]": Many(TEXT, "a list of texts"),
}
_TABLES: dict[str, type] = {"steps": StepRecord, "trade_offs": TradeOff}
_DOCUMENTS: dict[str, tuple[Callable[[Any], dict[str, object]], Callable[[object], Any]]] = {
    "machine": (codec.encode_machine, codec.decode_machine),
    "plan": (codec.encode_plan, codec.decode_plan),
    "trace": (codec.encode_trace, codec.decode_trace),
}
# By the types of the values' fields: another field needs another version.
_RULES: dict[type, dict[str, Rule]] = {
    kind: {each.name: _OF_TYPES[str(each.type)] for each in fields(kind) if each.type in _OF_TYPES}
    for kind in (RunRecord, SessionStats, StepRecord, TradeOff)
}
_RULES[RunRecord]["pace"] = Number(1e-9, 1e9)


def encode_run(record: RunRecord) -> dict[str, object]:
    """Return the document of a record.

    Raises:
        InvalidDocument: the trace, plan or machine is not sound and could not be read back.
    """
    parts = {name: getattr(record, name) for name in _DOCUMENTS}
    return {
        "format": FORMAT,
        "version": VERSION,
        **_encode_fields(record),
        "stats": _encode_fields(record.stats),
        **{name: _encode_table(getattr(record, name), kind) for name, kind in _TABLES.items()},
        **{
            name: None if part is None else _DOCUMENTS[name][0](part)
            for name, part in parts.items()
        },
    }


def decode_run(document: object) -> RunRecord:
    """Return the record of a document.

    Raises:
        InvalidDocument: the document is malformed or not sound; the message says where.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        refuse("format", f"{FORMAT!r}, which `session.report('run.json')` writes", found)
    if document.get("version") != VERSION:
        refuse("version", f"{VERSION}, which this swapkit reads", document.get("version"))
    parts = ("stats", *_TABLES, *_DOCUMENTS)
    keys = ("format", "version", *_RULES[RunRecord], *parts)
    content = _check_keys("document", document, keys)
    values: dict[str, Any] = _decode_fields("", content, RunRecord)
    stats = _check_keys("stats", content["stats"], tuple(_RULES[SessionStats]))
    values["stats"] = SessionStats(**_decode_fields("stats.", stats, SessionStats))
    for name, kind in _TABLES.items():
        values[name] = _decode_table(name, content[name], kind)
    for name, (_, decode) in _DOCUMENTS.items():
        with codec.inside(f"{name}."):
            values[name] = None if content[name] is None else decode(content[name])
    if values["plan"] is not None and values["trace"] is not None:
        with codec.inside("plan."):
            check_plan(values["plan"], values["trace"])
    return RunRecord(**values)


def write_run(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Write the document of a record; raises InvalidDocument, DiskError."""
    write_document(path, encode_run(record))


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read a record; raises InvalidDocument, OSError if there is no file to read."""
    with codec.inside(f"{path}: "):
        return decode_run(read_document(path))


def _encode_fields(value: object) -> dict[str, object]:
    return {name: rule.encode(getattr(value, name)) for name, rule in _RULES[type(value)].items()}


def _encode_table(rows: Sequence[object], kind: type) -> dict[str, object]:
    rules = _RULES[kind]
    return {"fields": list(rules), "rows": [list(_encode_fields(row).values()) for row in rows]}


def _decode_fields(prefix: str, content: Mapping[str, object], kind: type) -> dict[str, Any]:
    values = {}
    for name, rule in _RULES[kind].items():
        value = rule.decode(content[name])
        if not rule.holds(value):
            refuse(f"{prefix}{name}", rule.expectation, content[name])
        values[name] = value
    return values


def _decode_table(name: str, table: object, kind: type[Value]) -> tuple[Value, ...]:
    content = _check_keys(name, table, ("fields", "rows"))
    heads, rows = content["fields"], content["rows"]
    expected = list(_RULES[kind])
    if heads != expected:
        refuse(f"{name}.fields", ", ".join(map(repr, expected)), heads)
    if not isinstance(rows, list):
        refuse(f"{name}.rows", "a list of rows", rows)
    made = []
    for number, row in enumerate(rows):
        where = f"{name}[{number}]"
        if not isinstance(row, list) or len(row) != len(expected):
            refuse(where, f"a list of {len(expected)} values", row)
        values = dict(zip(expected, row, strict=True))
        made.append(kind(**_decode_fields(f"{where}.", values, kind)))
    return tuple(made)


def _check_keys(where: str, document: object, keys: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(document, dict):
        refuse(where, "an object", document)
    if missing := [key for key in keys if key not in document]:
        raise InvalidDocument(f"{where}: {missing[0]!r} is missing")
    if surplus := [key for key in document if key not in keys]:
        refuse(where, f"only {', '.join(map(repr, keys))}", surplus[0])
    return document
