"""Traces, machines and plans as JSON documents.

A document names its `format` and `version`. Operators, storages, events and decisions are tables:
the field names, then one row for each value. All content that is read is checked (`checks.py`), so
a document yields a sound value or an InvalidDocument that says where and why. A file is written
under a temporary name and then moved: a reader sees either the old file or the new one.

Example:
    >>> from swapkit.ir.machines import Machine
    >>> machine = Machine(budget_bytes=1 << 30, out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    >>> decode_machine(encode_machine(machine)) == machine
    True
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from swapkit.errors import InvalidDocument
from swapkit.ir.checks import check_machine, check_plan, check_trace
from swapkit.ir.documents import read_document, write_document
from swapkit.ir.fields import SHAPES, Shape, refuse
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Decision, Plan, Prediction
from swapkit.ir.traces import VERSION, Event, Operator, Storage, Trace
from swapkit.units import show

Value = TypeVar("Value")
PLANNED = "swapkit plan with its trace"
_HEADER = ("format", "version")
_TABLES: dict[str, type] = {"operators": Operator, "storages": Storage, "events": Event}


def encode_trace(trace: Trace) -> dict[str, object]:
    """Return the document of a trace.

    Raises:
        InvalidDocument: the trace is not sound and could not be read back.
    """
    check_trace(trace)
    tables = {name: _encode_table(getattr(trace, name), kind) for name, kind in _TABLES.items()}
    return _encode_head(SHAPES[Trace]) | _encode_fields(trace) | tables


def decode_trace(document: object) -> Trace:
    """Return the trace of a document.

    Raises:
        InvalidDocument: the document is malformed or the trace not sound; the message says where.
    """
    content = _decode_head(document, SHAPES[Trace], tuple(_TABLES))
    tables: dict[str, Any] = {
        name: _decode_table(name, content[name], kind) for name, kind in _TABLES.items()
    }
    trace = Trace(**_decode_fields(content, SHAPES[Trace]), **tables)
    check_trace(trace)
    return trace


def encode_machine(machine: Machine) -> dict[str, object]:
    """Return the document of a machine.

    Raises:
        InvalidDocument: the machine is not sound and could not be read back.
    """
    check_machine(machine)
    return _encode_head(SHAPES[Machine]) | _encode_fields(machine)


def decode_machine(document: object) -> Machine:
    """Return the machine of a document.

    Raises:
        InvalidDocument: the document is malformed; the message says where.
    """
    content = _decode_head(document, SHAPES[Machine], ())
    machine = Machine(**_decode_fields(content, SHAPES[Machine]))
    check_machine(machine)
    return machine


def encode_plan(plan: Plan) -> dict[str, object]:
    """Return the document of a plan.

    Raises:
        InvalidDocument: the plan is not sound and could not be read back.
    """
    check_plan(plan)
    return {
        **_encode_head(SHAPES[Plan]),
        **_encode_fields(plan),
        "prediction": None if plan.prediction is None else _encode_fields(plan.prediction),
        "decisions": _encode_table(plan.decisions, Decision),
    }


def decode_plan(document: object) -> Plan:
    """Return the plan of a document.

    Raises:
        InvalidDocument: the document is malformed or the plan not sound; the message says where.
    """
    content = _decode_head(document, SHAPES[Plan], ("prediction", "decisions"))
    decisions = _decode_table("decisions", content["decisions"], Decision)
    prediction = None
    if content["prediction"] is not None:
        shape = SHAPES[Prediction]
        fields = _check_keys("prediction", content["prediction"], tuple(shape.rules))
        prediction = Prediction(**_decode_fields(fields, shape))
    plan = Plan(**_decode_fields(content, SHAPES[Plan]), prediction=prediction, decisions=decisions)
    check_plan(plan)
    return plan


def encode_planned(trace: Trace, plan: Plan) -> dict[str, object]:
    """Return the document of a plan together with the trace it was made for.

    Raises:
        InvalidDocument: the plan or the trace is not sound, or the plan is for another trace.
    """
    check_plan(plan, trace)
    return {
        "format": PLANNED,
        "version": VERSION,
        "plan": encode_plan(plan),
        "trace": encode_trace(trace),
    }


def decode_planned(document: object) -> tuple[Trace, Plan]:
    """Return the trace and the plan of a document that has both.

    Raises:
        InvalidDocument: either is malformed, or they do not match; the message says where.
    """
    shape = Shape(title=PLANNED, version=VERSION, rules={})
    content = _decode_head(document, shape, ("trace", "plan"))
    with inside("trace."):
        trace = decode_trace(content["trace"])
    with inside("plan."):
        plan = decode_plan(content["plan"])
        check_plan(plan, trace)
    return trace, plan


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write the document of a trace; raises InvalidDocument, DiskError."""
    write_document(path, encode_trace(trace))


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; raises InvalidDocument, OSError if there is no file to read."""
    with inside(f"{path}: "):
        return decode_trace(read_document(path))


def write_machine(path: str | os.PathLike[str], machine: Machine) -> None:
    """Write the document of a machine; raises InvalidDocument, DiskError."""
    write_document(path, encode_machine(machine))


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine; raises InvalidDocument, OSError if there is no file to read."""
    with inside(f"{path}: "):
        return decode_machine(read_document(path))


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the document of a plan; raises InvalidDocument, DiskError."""
    write_document(path, encode_plan(plan))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; raises InvalidDocument, OSError if there is no file to read."""
    with inside(f"{path}: "):
        return decode_plan(read_document(path))


def write_planned(path: str | os.PathLike[str], trace: Trace, plan: Plan) -> None:
    """Write a plan together with its trace; raises InvalidDocument, DiskError."""
    write_document(path, encode_planned(trace, plan))


def read_planned(path: str | os.PathLike[str]) -> tuple[Trace, Plan]:
    """Read a trace and the plan for it; raises InvalidDocument, OSError if there is no file."""
    with inside(f"{path}: "):
        return decode_planned(read_document(path))


@contextlib.contextmanager
def inside(prefix: str) -> Iterator[None]:
    """Prepend `prefix` to the message of an InvalidDocument raised in the block."""
    try:
        yield
    except InvalidDocument as error:
        raise InvalidDocument(f"{prefix}{error}") from None


def _encode_head(shape: Shape) -> dict[str, object]:
    return {"format": shape.title, "version": shape.version}


def _encode_fields(value: object) -> dict[str, object]:
    shape = SHAPES[type(value)]
    return {
        name: rule.encode(getattr(value, name))
        for name, rule in shape.rules.items()
        if name not in shape.optional or getattr(value, name) is not None
    }


def _encode_table(rows: Sequence[object], kind: type) -> dict[str, object]:
    shape = SHAPES[kind]
    rules = {
        name: rule
        for name, rule in shape.rules.items()
        if name not in shape.optional or any(getattr(row, name) is not None for row in rows)
    }
    encoded = [[rule.encode(getattr(row, name)) for name, rule in rules.items()] for row in rows]
    return {"fields": list(rules), "rows": encoded}


def _decode_head(document: object, shape: Shape, parts: tuple[str, ...]) -> dict[str, object]:
    """Check the format and version of a document, and that it has exactly these parts."""
    if not isinstance(document, dict):
        refuse("document", f"an object, a {shape.title}", document)
    if document.get("format") != shape.title:
        refuse("format", repr(shape.title), document.get("format"))
    version = document.get("version")
    if type(version) is not int or version < 1:
        refuse("version", f"a whole number from 1 to {shape.version}", version)
    if version > shape.version:
        raise InvalidDocument(
            f"version: {show(version)} is newer than {shape.version}, the newest that this "
            "swapkit reads. Read the document with the swapkit that wrote it, or write it again "
            "with this one."
        )
    missing = [name for name in shape.optional if name not in document]
    rules = [name for name in shape.rules if name not in missing]
    return _check_keys("document", document, (*_HEADER, *rules, *parts))


def _check_keys(where: str, document: object, keys: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(document, dict):
        refuse(where, "an object", document)
    for key in keys:
        if key not in document:
            raise InvalidDocument(
                f"{where}: {key!r} is missing; the keys are {show(list(document))}"
            )
    for key in document:
        if key not in keys:
            refuse(where, f"only {', '.join(map(repr, keys))}", key)
    return document


def _decode_fields(content: dict[str, object], shape: Shape) -> dict[str, Any]:
    rules = shape.rules.items()
    return {name: rule.decode(content[name]) for name, rule in rules if name in content}


def _decode_table(name: str, table: object, kind: type[Value]) -> tuple[Value, ...]:
    shape = SHAPES[kind]
    rules = shape.rules
    content = _check_keys(name, table, ("fields", "rows"))
    fields, rows = content["fields"], content["rows"]
    if not isinstance(fields, list) or not _is_complete(fields, shape):
        refuse(f"{name}.fields", f"each of {', '.join(map(repr, rules))} once", fields)
    if not isinstance(rows, list):
        refuse(f"{name}.rows", "a list of rows", rows)
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(fields):
            refuse(f"{name}[{number}]", f"a list of {len(fields)} values", row)
    columns = [
        map(rules[field].decode, column)
        for field, column in zip(fields, zip(*rows, strict=True), strict=False)
    ]
    decoded = zip(*columns, strict=True) if columns else ()
    return tuple(kind(**dict(zip(fields, row, strict=True))) for row in decoded)


def _is_complete(fields: list[object], shape: Shape) -> bool:
    """Return whether a table has every column once; optional columns may be missing."""
    found = [*fields, *(name for name in shape.optional if name not in fields)]
    return sorted(map(repr, found)) == sorted(map(repr, shape.rules))
