"""The base of all commands: exit codes, and errors as one line without a traceback."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from swapkit.errors import SwapkitError
from swapkit.units import parse_bytes

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
    metavar="FILE",
    help="Speeds of the target machine, as `swapkit machine --json FILE` writes them "
    "(default: this machine).",
)


def check_budget(budget: str) -> None:
    """Check an amount of memory before the device is known.

    Raises:
        InvalidArgument: it cannot be parsed.
    """
    if budget != AUTO:
        parse_bytes(budget, whole_bytes=_ANY_WHOLE_BYTES, name="--budget")
