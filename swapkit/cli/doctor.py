"""`swapkit doctor`: checks what swapkit needs, and says what to do about problems."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import click

from swapkit.cli.base import DONE, FAILED, CliCommand
from swapkit.cli.findings import Finding, Level, count_level, encode_findings
from swapkit.cli.output import waiting
from swapkit.errors import SwapkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COLOURS = {Level.GOOD: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}
_REMEDY = "       -> "


@click.command(cls=CliCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(*, as_json: bool) -> int:
    """Check this machine, and say what to do about each problem.

    Compiler, cache, torch, driver, link to the host, NUMA nodes, limits, variables; and a small
    training with and without a budget, whose bits are compared. Ends with 1 if there is a problem.
    """
    from swapkit.cli.checks import CHECKS

    findings = []
    with _silent():
        for name, check in CHECKS:
            with waiting(name):
                findings.append(run_check(name, check))
            if not as_json:
                _show_row(findings[-1])
    if as_json:
        click.echo(json.dumps(encode_findings(findings), indent=2))
    else:
        _show_remedies(findings)
    return FAILED if count_level(findings, Level.PROBLEM) else DONE


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Log no warnings inside the context: the findings say the same."""
    logger = logging.getLogger("swapkit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_check(name: str, check: Callable[[], Finding]) -> Finding:
    """Return a check's finding; an exception is a problem."""
    try:
        return check()
    except (SwapkitError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Finding(
            name=name,
            text=f"{type(error).__name__}: {error}",
            level=Level.PROBLEM,
            remedy="" if isinstance(error, SwapkitError) else "report it with the whole output",
        )


def _show_row(finding: Finding) -> None:
    row = f"{finding.level.value:7}  {finding.name:11}  {_first_line(finding.text)}"
    click.secho(row, fg=None if os.environ.get("NO_COLOR") else _COLOURS[finding.level])
    sys.stdout.flush()  # a check may take a minute


def _show_remedies(findings: list[Finding]) -> None:
    for each in findings:
        if each.level is not Level.GOOD and (each.remedy or "\n" in each.text):
            click.echo(f"\n{each.level.value}: {each.name}: {each.text}")
            if each.remedy:
                click.echo(f"{_REMEDY}{each.remedy}")
    problems, notes = (count_level(findings, level) for level in (Level.PROBLEM, Level.NOTE))
    click.echo(f"\n{problems} problem(s), {notes} note(s)")


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
