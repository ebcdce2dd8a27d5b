"""The base of all commands: exit codes, and errors as one line without a traceback."""

from __future__ import annotations

from typing import Any

import click

from swapkit.errors import SwapkitError

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
