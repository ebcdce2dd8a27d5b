"""Reads a file that can be replayed, whichever of the known kinds it is."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument, InvalidDocument
from swapkit.ir.allocations import allocations_of_intervals, allocations_of_step
from swapkit.ir.codec import PLANNED, decode_allocations, decode_planned, decode_trace, inside
from swapkit.ir.documents import parse_document
from swapkit.ir.fields import ALLOCATIONS, TRACE, refuse
from swapkit.ir.snapshot_allocations import read_snapshot_allocations
from swapkit.units import show

if TYPE_CHECKING:
    from swapkit.ir.allocations import AllocationTrace

_PICKLE = b"\x80"  # of protocol 2 and later
_COLUMNS = ("lower", "upper", "size")


def read_replayable(path: str, *, device: int | None = None) -> AllocationTrace:
    """Read the requests of a file.

    Args:
        path: a snapshot of `torch.cuda.memory._dump_snapshot`; a document of allocations, of a
            recorded step, or of a plan with its step; or a table with a row `lower,upper,size` for
            each block (CSV), which lives from `lower` until before `upper`.
        device: of a snapshot, the device whose history to read; None: the only one with a history.

    Raises:
        InvalidDocument: the file is none of these, or malformed; the message says where.
        InvalidArgument: `device` is given, and the file is no snapshot.
        OSError: the file cannot be read.
    """
    file = Path(path)
    with file.open("rb") as opened:
        start = opened.read(1)
    if start == _PICKLE:
        return read_snapshot_allocations(path, device=device)
    if device is not None:
        raise InvalidArgument(f"--device {device}: {path} has one device; only snapshots have more")
    with inside(f"{path}: "):
        content = file.read_bytes()
        if content.lstrip()[:1] in {b"{", b"["}:
            return _decode(parse_document(content))
        return _read_table(content, file.name)


def _decode(document: object) -> AllocationTrace:
    title = document.get("format") if isinstance(document, dict) else None
    if title == ALLOCATIONS.title:
        return decode_allocations(document)
    if title == TRACE.title:
        return allocations_of_step(decode_trace(document))
    if title == PLANNED:
        return allocations_of_step(decode_planned(document)[0])
    return refuse("format", f"{ALLOCATIONS.title!r}, {TRACE.title!r} or {PLANNED!r}", title)


def _read_table(content: bytes, label: str) -> AllocationTrace:
    """Read a table of lives, as MiniMalloc and many generators write it."""
    try:
        rows = csv.DictReader(io.StringIO(content.decode("utf-8")), strict=True)
        names = rows.fieldnames or ()
        if not set(_COLUMNS) <= set(names):
            raise InvalidDocument(
                "neither a snapshot, nor a JSON document, nor a table with the columns "
                f"{', '.join(_COLUMNS)}; the first line is {show(','.join(names))}"
            )
        intervals = [tuple(int(row[name]) for name in _COLUMNS) for row in rows]
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"neither a snapshot nor text: {error}") from error
    except (csv.Error, TypeError, ValueError) as error:
        raise InvalidDocument(f"cannot be read as a table of whole numbers: {error}") from error
    return allocations_of_intervals(
        [(low, high, size) for low, high, size in intervals], label=label
    )
