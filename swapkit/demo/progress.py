"""How far the demo is: a line for everything that is done, and a bar where there is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Is told how it goes."""

    def now(self, what: str) -> None:
        """Note what is done next."""

    def done(self, units: int) -> None:
        """Note that so much more of the whole is done."""

    def say(self, line: str) -> None:
        """Tell something that stays."""


@contextmanager
def show_progress(console: Console, *, total: int) -> Iterator[Progress]:
    """Print a line for everything that is done; on a terminal draw a bar below the lines.

    Args:
        console: where to.
        total: length of the bar.
    """
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield _ConsoleProgress(console, bar, bar.add_task("starting", total=total))


class _ConsoleProgress:
    """Prints lines, moves the bar."""

    def __init__(self, console: Console, bar: Bar, task: TaskID) -> None:
        self._console = console
        self._bar = bar
        self._task = task

    def now(self, what: str) -> None:
        """Name what is done next.

        Args:
            what: in a few words.
        """
        self._bar.update(self._task, description=what)

    def done(self, units: int) -> None:
        """Move the bar.

        Args:
            units: of its length.
        """
        self._bar.advance(self._task, units)

    def say(self, line: str) -> None:
        """Print a line.

        Args:
            line: of plain text.
        """
        self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
