"""The base of all commands: exit codes, errors as one line, tables or plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

import click

from swapkit.errors import SwapkitError
from swapkit.reporting.text import format_table
from swapkit.units import parse_bytes

# ---- output --------------------------------------------------------------------------------------
#
# Output: rich tables where stdout is a terminal, plain lines elsewhere.


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
    from rich.text import Text

    table = Table(*heads, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))  # brackets are no markup
    Console().print(table)


# ---- base ----------------------------------------------------------------------------------------
#
# The base of all commands: exit codes, and errors as one line without a traceback.

AUTO = "auto"  # the budget: what is free
_ANY_WHOLE_BYTES = 1 << 40  # shares are resolved when the device is known
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class CliCommand(click.Command):
    """A command that returns its exit code, and reports errors as `swapkit COMMAND: text`."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's interface
        """Run the command; return its exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `| head`: click ends the process without a word
            raise
        except (SwapkitError, OSError) as error:
            click.echo(f"{ctx.command_path}: {error}", err=True)
            return code_of(error)


def code_of(error: Exception) -> int:
    """Return the exit code for an error: `BAD_INPUT` if other options or files would help.

    Args:
        error: an error of swapkit or of the operating system.
    """
    is_bad_input = isinstance(error, (ValueError, NotImplementedError, OSError))
    return BAD_INPUT if is_bad_input else FAILED


# A command whose arguments after the first belong to a script.
script_command = partial(
    click.command,
    cls=CliCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
machine_option = click.option(
    "--machine",
    "machine_file",
    metavar="FILE|NAME",
    help="The target machine (default: this one): its speeds, as `swapkit machine --json FILE` "
    "writes them, or a device that is not at hand, whose times are modelled: H100, H200, A100, "
    "4090, 910B.",
)


def check_budget(budget: str) -> None:
    """Check an amount of memory before the device is known.

    Raises:
        InvalidArgument: it cannot be parsed.
    """
    if budget != AUTO:
        parse_bytes(budget, whole_bytes=_ANY_WHOLE_BYTES, name="--budget")
