"""Output: rich tables where stdout is a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, TextIO

import click

from swapkit.reporting.text import format_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def take_stdout() -> TextIO:
    """Return stdout for the command alone.

    From now on all else that the process and its children print to stdout goes to stderr.
    """
    sys.stdout.flush()
    stdout, stderr = 1, 2  # the descriptors: libraries in C print there
    own = os.dup(stdout)
    os.dup2(stderr, stdout)
    return open(own, "w", encoding="utf-8")


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their headings to stdout.

    Args:
        heads: a heading for each column.
        rows: the cells.
    """
    if not sys.stdout.isatty():
        click.echo(format_table(heads, rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*_plain(row))
    Console().print(table)


def _plain(cells: Sequence[str]) -> list[str]:
    """Return cells whose brackets rich does not read as markup."""
    from rich.markup import escape

    return [escape(cell) for cell in cells]


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal what the command is busy with; elsewhere print nothing.

    Args:
        what: a few words.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield
