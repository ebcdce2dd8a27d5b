r"""Texts as terminals and logs may show them: names come from programs, files and other ranks.

A control character in a name moves the cursor, changes colours or begins a line that looks like
another program's; a direction mark reorders what is shown. `printable` shows them as escapes.
Names are escaped where a table or a list of holders is written, records of loggers by their logger,
and the texts of errors by `SwapkitError`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

# What `re.compile` raises: also for too large a number of repetitions, and for deep nesting.
PATTERN_ERRORS = (re.error, OverflowError, RecursionError)
PATIENCE_SECONDS = 2.0  # after which a line says what is under way
_here = threading.local()
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return a text as one line, with an escape for each character that is not shown.

    Example:
        >>> print(printable("layer\x1b[31m\n1"))
        layer\x1b[31m\n1
    """
    return printable_lines(text).replace("\n", "\\n")


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which no file can have; they are escaped."""
    return text.encode(errors="backslashreplace").decode()


def printable_lines(text: str) -> str:
    """Return a text with an escape for each character that is not shown; its lines stay."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def get_logger(topic: str) -> logging.Logger:
    """Return the logger of a topic, below `swapkit`; the records that it makes are safe to show.

    Lines after a record's first are indented, so that no name can begin one that looks like another
    record.
    """
    logger = logging.getLogger(f"swapkit.{topic}")
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    shown = printable_lines(text).replace("\n", "\n  ")
    if shown != text:
        record.msg, record.args = shown, ()
    return True


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on stderr what is under way: on a terminal at once, elsewhere if it takes long.

    Inside of another one on the same thread, show nothing: two would write over each other.

    Args:
        what: a few words.
    """
    if getattr(_here, "is_waiting", False):
        yield
        return
    _here.is_waiting = True
    try:
        with _shown(what):
            yield
    finally:
        _here.is_waiting = False


@contextlib.contextmanager
def _shown(what: str) -> Iterator[None]:
    if not _is_terminal(sys.stderr):
        timer = threading.Timer(PATIENCE_SECONDS, _say, (f"{what} ...", sys.stderr))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


# stderr is None in a process without one, may be closed, or be a program's own object.
_NO_STREAM = (AttributeError, OSError, ValueError)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except _NO_STREAM:
        return False


def _say(line: str, stream: TextIO) -> None:
    with contextlib.suppress(*_NO_STREAM):
        stream.write(f"{line}\n")
        stream.flush()
