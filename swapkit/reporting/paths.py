"""The names of files that a session writes: the suffix says what they contain."""

from __future__ import annotations

import os

from swapkit.errors import InvalidArgument, InvalidType
from swapkit.units import show

PAGE, RECORD = ".html", ".json"
TRACE, PACKED_TRACE = ".json", ".json.gz"
_REPORTS = {
    PAGE: "a page to look at",
    RECORD: "a record that `swapkit report` draws later",
}
_TRACES = {
    TRACE: "a trace for Perfetto and chrome://tracing",
    PACKED_TRACE: "the same compressed",
}


def check_report(path: object) -> str:
    """Return the suffix of a report's file, `PAGE` or `RECORD`.

    Raises:
        InvalidType: it is not a path.
        InvalidArgument: its name ends in neither .html nor .json.
    """
    return _check(path, _REPORTS)


def check_trace(path: object) -> str:
    """Return the suffix of a trace's file, `TRACE` or `PACKED_TRACE`; raises as `check_report`."""
    return _check(path, _TRACES)


def _check(path: object, suffixes: dict[str, str]) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"path={show(path)}: expected the path of the file to write")
    name = os.fspath(path)
    file = os.path.basename(name).lower() if isinstance(name, str) else ""
    for suffix in suffixes:
        if file.endswith(suffix) and file != suffix:
            return suffix
    ends = ", or in ".join(f"{suffix}, for {what}" for suffix, what in suffixes.items())
    raise InvalidArgument(f"path={show(name)}: expected a name that ends in {ends}")
