"""JSON files: read without surprises, written so that people can read them, too."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from swapkit.errors import DiskError, InvalidArgument, InvalidDocument, InvalidType
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_STEP = "  "


def read_document(path: str | os.PathLike[str]) -> object:
    """Return what a JSON file holds.

    Raises:
        InvalidDocument: it is no JSON, has a key twice, or a number that is none.
        OSError: it cannot be read.
    """
    return parse_document(Path(path).read_bytes())


def parse_document(content: bytes) -> object:
    """Return what JSON holds; raises InvalidDocument as `read_document` does."""
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_make_object,
            parse_constant=_refuse_constant,
        )
    except InvalidDocument:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidDocument(f"document: no JSON from {where} on: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, too many digits, too deep
        raise InvalidDocument(f"document: cannot be read as JSON: {error}") from error


def write_document(path: str | os.PathLike[str], document: dict[str, object]) -> None:
    """Write a document of plain values: all of it, or nothing.

    Raises:
        InvalidArgument: that is no path.
        DiskError: it cannot be written; what was there before still is. An `OSError`.
    """
    target = _find_target(path)
    try:
        _replace(target, document)
    except OSError as error:
        raise DiskError(f"path={os.fspath(path)!r}: {_explain(error, target)}") from error


def _find_target(path: object) -> Path:
    """Return the file that is meant, behind all links."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"path={show(path)}: expected the path of the file to write")
    name = os.fspath(path)
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgument(f"path={show(name)}: expected the path of the file to write")
    return Path(os.path.realpath(name))


def _explain(error: OSError, target: Path) -> str:
    """Return why a file cannot be written, and what to try; the part beside it stays unnamed."""
    folder = target.parent
    if os.path.isdir(target):
        return "this is a folder; give the path of a file in it"
    if not os.path.lexists(folder):
        return f"the folder {str(folder)!r} does not exist; make it first, or give another path"
    if not os.path.isdir(folder):
        return f"{str(folder)!r} is no folder; give another path"
    return f"it cannot be written: {error.strerror or error}; give another path"


def _replace(target: Path, document: dict[str, object]) -> None:
    """Write a file beside another and put it in its place."""
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with part.open("x", encoding="utf-8") as file:
            file.writelines(_render(document, ""))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _render(value: object, indent: str) -> Iterator[str]:
    """Yield the text of a value: an object's keys and a table's rows on lines of their own."""
    inner = indent + _STEP
    if isinstance(value, dict) and value:
        separator = "{\n"
        for key, content in value.items():
            yield f"{separator}{inner}{_COMPACT.encode(key)}: "
            yield from _render(content, inner)
            separator = ",\n"
        yield f"\n{indent}}}"
    elif isinstance(value, list) and value and isinstance(value[0], list):
        yield "[\n" + ",\n".join(inner + _COMPACT.encode(row) for row in value) + f"\n{indent}]"
    else:
        yield _COMPACT.encode(value)


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidDocument(f"document: the key {twice!r} is there twice")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidDocument(f"document: {name} is no number that a document may have")
