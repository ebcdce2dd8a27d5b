"""One line of a log, as a value: who configures decides where it goes."""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A text and its level, a number of `logging`."""

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
