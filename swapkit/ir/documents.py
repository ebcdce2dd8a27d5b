"""Strict reading of JSON files; human-readable, atomic writing of JSON and of text."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from swapkit.errors import DiskError, InvalidArgument, InvalidDocument, InvalidType
from swapkit.units import show

_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_STEP = "  "


def read_document(path: str | os.PathLike[str]) -> object:
    """Return the content of a JSON file.

    Raises:
        InvalidDocument: the file is not JSON, or has a duplicate key, NaN or an infinity.
        OSError: the file cannot be read.
    """
    return parse_document(Path(path).read_bytes())


def parse_document(content: bytes) -> object:
    """Return the content of JSON text; raises InvalidDocument as `read_document` does."""
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
        raise InvalidDocument(f"document: invalid JSON at {where}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, nested too deep
        raise InvalidDocument(f"document: cannot be read as JSON: {error}") from error


def write_document(path: str | os.PathLike[str], document: dict[str, object]) -> None:
    """Write a document of plain values atomically.

    Raises:
        InvalidArgument: `path` is not a path.
        DiskError: the file cannot be written; the previous content stays. An `OSError`.
    """

    def write(file: BinaryIO) -> None:
        file.writelines(text.encode() for text in _render(document, ""))
        file.write(b"\n")

    write_file(path, write)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as UTF-8, atomically; raises as `write_document` does."""
    write_file(path, lambda file: file.write(text.encode()))


def write_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically: under a temporary name, which is then moved into place.

    Args:
        path: the file.
        write: writes the content; it is called once.

    Raises:
        InvalidArgument: `path` is not a path.
        DiskError: the file cannot be written; the previous content stays. An `OSError`.
    """
    target = _find_target(path)
    try:
        _replace(target, write)
    except OSError as error:
        raise DiskError(f"path={os.fspath(path)!r}: {_explain(error, target)}") from error


def _find_target(path: object) -> Path:
    """Return the file that `path` names, with all links resolved."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"path={show(path)}: expected the path of the file to write")
    name = os.fspath(path)
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgument(f"path={show(name)}: expected the path of the file to write")
    return Path(os.path.realpath(name))


def _explain(error: OSError, target: Path) -> str:
    """Return why a file cannot be written, and what to try, without naming the temporary file."""
    folder = target.parent
    if os.path.isdir(target):
        return "this is a folder; pass the path of a file in it"
    if not os.path.lexists(folder):
        return f"the folder {str(folder)!r} does not exist; create it first, or pass another path"
    if not os.path.isdir(folder):
        return f"{str(folder)!r} is not a folder; pass another path"
    return f"cannot write it: {error.strerror or error}; pass another path"


def _replace(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file next to the target, then move it into place."""
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with part.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _render(value: object, indent: str) -> Iterator[str]:
    """Yield the text of a value, with each key of an object and row of a table on its own line."""
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
        raise InvalidDocument(f"document: the key {twice!r} appears twice")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidDocument(f"document: expected finite numbers, got {name}")
