"""`swapkit report`: draws the page of a record that a session wrote."""

from __future__ import annotations

from pathlib import Path

import click

from swapkit.cli.base import DONE, CliCommand
from swapkit.reporting.paths import PAGE
from swapkit.texts import waiting


@click.command(cls=CliCommand)
@click.argument("record", metavar="RUN.json")
@click.option("-o", "--output", metavar="FILE.html", help="The page (default: RUN.html beside it).")
def report(*, record: str, output: str | None) -> int:
    """Draw the report of a session as a page that works offline.

    RUN.json is the record that session.report("run.json") or swapkit run --report run.json wrote,
    here or on another computer.
    """
    from swapkit.reporting.html.page import draw_report

    page = Path(record).with_suffix(PAGE) if output is None else Path(output)
    with waiting("drawing"):
        draw_report(record, page)
    click.echo(f"{page}: {page.stat().st_size:,} bytes")
    return DONE
