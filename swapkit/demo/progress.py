"""Progress of the demo: a line for each finished part, and a bar on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Receiver of progress messages."""

    def now(self, what: str) -> None:
        """Show the name of the next part."""

    def done(self, units: int) -> None:
        """Add finished units."""

    def say(self, line: str) -> None:
        """Print a permanent line."""


@contextmanager
def show_progress(console: Console, *, total: int) -> Iterator[Progress]:
    """Print a line for each finished part; on a terminal, draw a bar below the lines.

    Args:
        console: output console.
        total: length of the bar.
    """
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield _ConsoleProgress(console, bar, bar.add_task("starting", total=total))


class _ConsoleProgress:
    """Progress on a rich console."""

    def __init__(self, console: Console, bar: Bar, task: TaskID) -> None:
        self._console = console
        self._bar = bar
        self._task = task

    def now(self, what: str) -> None:
        """Show the name of the next part.

        Args:
            what: a few words.
        """
        self._bar.update(self._task, description=what)

    def done(self, units: int) -> None:
        """Move the bar.

        Args:
            units: units of its length.
        """
        self._bar.advance(self._task, units)

    def say(self, line: str) -> None:
        """Print a line.

        Args:
            line: plain text.
        """
        self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
