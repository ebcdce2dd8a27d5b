"""Log lines as values: the caller of the configuration decides where to log them."""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A text and its `logging` level."""

    level: int
    text: str

    def __str__(self) -> str:
        return f"{logging.getLevelName(self.level)} - {self.text}"


def info(text: str) -> LogLine:
    """Return a line of level INFO."""
    return LogLine(level=logging.INFO, text=text)


def warning(text: str) -> LogLine:
    """Return a line of level WARNING."""
    return LogLine(level=logging.WARNING, text=text)
