"""The files of a report: a page to look at (.html), or a record from which it is drawn (.json)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument, InvalidType
from swapkit.ir.documents import write_text
from swapkit.reporting.html.drawing import require_bokeh
from swapkit.reporting.html.page import render_page
from swapkit.reporting.run_records import read_run, write_run
from swapkit.units import show

if TYPE_CHECKING:
    from swapkit.reporting.run_records import RunRecord

PAGE, RECORD = ".html", ".json"


def check_target(path: object) -> str:
    """Return the kind of file that a path names, `PAGE` or `RECORD`.

    Raises:
        InvalidType: it is not a path.
        InvalidArgument: its name ends in neither .html nor .json.
        MissingPackage: it is a page, and Bokeh is not installed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"path={show(path)}: expected the path of a file .html or .json")
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1].lower() if isinstance(name, str) else ""
    if suffix not in {PAGE, RECORD}:
        raise InvalidArgument(
            f"path={show(name)}: expected a name that ends in .html, for a page to look at, or in "
            ".json, for a record that `swapkit report` draws later"
        )
    if suffix == PAGE:
        require_bokeh()
    return suffix


def write_report(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Write a record as a page or as a document, depending on the name of the file.

    Raises:
        InvalidArgument, InvalidType, MissingPackage: as for `check_target`.
        DiskError: the file cannot be written; its previous content stays.
    """
    if check_target(path) == RECORD:
        write_run(path, record)
    else:
        write_text(path, render_page(record))


def draw_report(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Draw the page of a record that `session.report("run.json")` wrote.

    Args:
        source: the record.
        target: the page; its name ends in .html.

    Raises:
        InvalidArgument: `target` is not a page.
        InvalidDocument: `source` is not a record.
        OSError: it cannot be read.
        MissingPackage, DiskError: as for `write_report`.
    """
    if check_target(target) != PAGE:
        raise InvalidArgument(f"path={show(os.fspath(target))}: expected a name that ends in .html")
    write_report(target, read_run(source))
