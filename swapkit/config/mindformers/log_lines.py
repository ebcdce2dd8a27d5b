"""Log lines as values: the caller of the configuration decides where to log them."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple


class LogLine(NamedTuple):
    """A text and its `logging` level."""

    level: int
    text: str

    def __str__(self) -> str:
        return f"{logging.getLevelName(self.level)} - {self.text}"


info, warning = partial(LogLine, logging.INFO), partial(LogLine, logging.WARNING)
