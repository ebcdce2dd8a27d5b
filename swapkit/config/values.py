"""Values as a table describes them, such as `a whole number from 20 to 512`, or `True or False`.

The words that errors and documents show are what a value is checked by, so they never differ.
"""

from __future__ import annotations

import math
import operator
import re

_COMPARES = {
    **dict.fromkeys(("from", "at least"), operator.ge),
    **dict.fromkeys(("to", "at most"), operator.le),
    "above": operator.gt,
    "below": operator.lt,
}
_LIMIT = re.compile(rf"\b({'|'.join(_COMPARES)}) (-?\d+)")
_KINDS = {"a number": (int, float), "a whole number": int, "a power of 2": int}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def accepts(words: str, value: object) -> bool:
    """Return whether a value is a number as described; True and False are none."""
    kind = next((kind for name, kind in _KINDS.items() if words.startswith(name)), ())
    return (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and all(_COMPARES[word](value, int(limit)) for word, limit in _LIMIT.findall(words))
        and (not words.startswith("a power") or (value > 0 and not value & (value - 1)))
    )


def read_value(words: str, text: str) -> int | float | bool | str:
    """Return the number that a text is, else the one of the described texts that it is.

    Raises:
        ValueError: it is not as described.

    Example:
        >>> read_value("a whole number from 20 to 512", "64"), read_value("True or False", "True")
        (64, True)
    """
    if not words.startswith(tuple(_KINDS)):
        if text in re.split(", | or ", words):
            return _BOOLS.get(text.lower(), text)
    elif words.startswith("a number") or text.isdecimal():  # `int` accepts signs and underscores
        value = float(text) if words.startswith("a number") else int(text)
        if value != math.inf and accepts(words, value):
            return value
    raise ValueError(text)
