"""Reading YAML, which is JSON too, in time and memory in proportion to its text.

An alias stands for a whole part of the document, so a text of a few lines can describe more values
than memory holds. Python refuses to nest calls deeply, and to read numbers of thousands of digits.
"""

from __future__ import annotations

import re
from pathlib import Path

from swapkit.errors import InvalidConfiguration

MOST_LEVELS = 100
MOST_VALUES = 100_000  # with aliases written out
MOST_DIGITS = 100
_NUMBER = re.compile(r"[-+]?[0-9][-+:._0-9a-fA-FxX]*")  # and some texts without spaces


def read_yaml(text: str, name: str) -> object:
    """Return the content of a YAML document.

    Args:
        text: the document.
        name: what errors call it.

    Raises:
        InvalidConfiguration: it is not valid YAML; or it is nested too deeply, has too many values
            or a number with too many digits.
    """
    import yaml  # needed only for documents

    try:
        _check(text)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidConfiguration(f"{name} is not valid YAML: {error}") from None
    except _TooMuch as error:
        raise InvalidConfiguration(f"{name} {error}") from None
    # The constructor of a value, such as a date, does not check its text.
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise InvalidConfiguration(f"{name} has a value that YAML cannot read: {error}") from None


def read_text(path: Path) -> str:
    """Return the text of a document.

    Raises:
        InvalidConfiguration: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfiguration(f"{path} is not UTF-8: {error.reason}") from None


class _TooMuch(Exception):
    """The document asks for more than its text says."""


def _check(text: str) -> None:
    """Raise if a document is too large once it is read; reads its events, which do not nest."""
    import yaml

    anchors: dict[str | None, int] = {}  # how many values each stands for
    around: list[tuple[str | None, int]] = []  # the parts around this place; values before them
    values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = around.pop()
        elif isinstance(event, yaml.NodeEvent):
            anchor, before = event.anchor, values
            values += 1
        else:
            continue
        if isinstance(event, yaml.CollectionStartEvent):
            around.append((anchor, before))
            _limit(len(around), MOST_LEVELS, "levels")
            anchors[anchor] = MOST_VALUES  # until it ends: an alias inside it would have no end
        elif isinstance(event, yaml.AliasEvent):
            values += anchors.get(anchor, 0)
        else:
            anchors[anchor] = values - before
        _limit(values, MOST_VALUES, "values")
        if isinstance(event, yaml.ScalarEvent) and _NUMBER.fullmatch(event.value):
            _limit(len(event.value), MOST_DIGITS, "digits in a number")


def _limit(number: int, most: int, what: str) -> None:
    if number > most:
        raise _TooMuch(f"has more than {most} {what}")
