"""The root of the command line: its commands, and the options for building operators."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from swapkit import __version__
from swapkit.cli.base import BAD_INPUT, DONE, INTERRUPTED, CliCommand
from swapkit.cli.build import build
from swapkit.cli.doctor import doctor
from swapkit.cli.estimate_script import estimate
from swapkit.cli.machine import machine
from swapkit.cli.plan_trace import plan
from swapkit.cli.report import report
from swapkit.cli.run import run

NAME = "swapkit"
_CODES = """\b
Exit codes:
  0    done; doctor: no problem, notes at most
  1    failed; doctor: a problem
  2    wrong options, an unreadable file, or a budget that no plan fits
  130  interrupted (Ctrl-C)
`swapkit run` ends with the exit code of the script; a script that raises ends with 1.
"""


class _Root(click.Group):
    """The commands in the order in which a newcomer meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list(self.commands)


@click.group(
    NAME,
    cls=_Root,
    invoke_without_command=True,
    no_args_is_help=True,
    epilog=_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    __version__, "-V", "--version", prog_name=NAME, message="%(prog)s %(version)s"
)
@click.option("--cflags", is_flag=True, help="Print the compiler's options for custom operators.")
@click.option("--libs", is_flag=True, help="Print the linker's options for custom operators.")
@click.option(
    "--compat",
    is_flag=True,
    help="With --cflags: also for MindSpeed's header NPUSwapManager.h.",
)
@click.pass_context
def root(ctx: click.Context, *, cflags: bool, libs: bool, compat: bool) -> int:
    """Train PyTorch models inside a memory budget."""
    ctx.default_map = _read_defaults()
    options = {"--cflags": cflags, "--libs": libs, "--compat": compat}
    asked = [name for name, is_asked in options.items() if is_asked]
    if compat and not cflags:
        raise click.UsageError(
            "--compat without --cflags: it adds a folder to the compiler's options. Call "
            f"'{NAME} --cflags{' --libs' * libs} --compat'."
        )
    command = ctx.invoked_subcommand
    if asked and command is not None:
        raise click.UsageError(
            f"{' '.join(asked)} with the command {command!r}: a call prints options or runs a "
            f"command. Call {' '.join([NAME, *asked])!r} or '{NAME} {command} ...'."
        )
    if asked:
        click.echo(_flags(cflags=cflags, libs=libs, compat=compat))
    return DONE


_COMMANDS: tuple[CliCommand, ...] = (
    run,
    doctor,
    estimate,
    plan,
    report,
    machine,
    build,
)
for _command in _COMMANDS:
    root.add_command(_command)


def _read_defaults() -> dict[str, dict[str, object]]:
    """Return the options by command that `[tool.swapkit.COMMAND]` of ./pyproject.toml sets.

    Python 3.10 has no parser for the file.

    Raises:
        UsageError: the file is malformed, or a command or option does not exist.
    """
    file = Path("pyproject.toml")
    if sys.version_info < (3, 11) or not file.is_file():
        return {}
    import tomllib

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"pyproject.toml: {error}") from None
    tool = document.get("tool")
    found = tool.get("swapkit", {}) if isinstance(tool, dict) else {}
    if not isinstance(found, dict):
        raise click.UsageError("pyproject.toml: [tool.swapkit]: expected a table for each command")
    return {name: _read_options(name, table) for name, table in found.items()}


def _read_options(name: str, table: object) -> dict[str, object]:
    """Return the options of one command, as a command line would have them.

    Raises:
        UsageError: there is no such command, or no such option of it.
    """
    command = root.commands.get(name)
    params = [] if command is None else command.params
    known = {each.name: each for each in params if isinstance(each, click.Option)}
    if isinstance(table, dict) and known:
        lists = {key for key, each in table.items() if isinstance(each, list)}
        several = {key for key, each in known.items() if getattr(each, "multiple", False)}
        if known.keys() >= table.keys() and lists <= several:
            return {key: _as_text(each) for key, each in table.items()}
    raise click.UsageError(
        f"pyproject.toml: [tool.swapkit.{name}]: expected a command, with its options by "
        "their names in Python, such as host_limit"
    )


def _as_text(value: object) -> object:
    if isinstance(value, list):
        return [str(each) for each in value]
    return value if isinstance(value, bool) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its options; None: those of the process.

    Returns:
        The exit code.
    """
    given = None if arguments is None else list(arguments)
    try:
        code = root.main(given, prog_name=NAME, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else BAD_INPUT


def _flags(*, cflags: bool, libs: bool, compat: bool) -> str:
    from swapkit._native import hooks

    flags = []
    if cflags:
        flags += [f"-I{hooks.INCLUDE}"] + [f"-I{hooks.COMPAT}"] * compat
    if libs:
        flags += [f"-L{hooks.FOLDER}", "-lswapkit", f"-Wl,-rpath,{hooks.FOLDER}"]
    return shlex.join(flags)
