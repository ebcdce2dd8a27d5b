"""Values as a table describes them, such as `a whole number from 20 to 512`, or `True or False`.

The words that errors and documents show are what a value is checked by, so they never differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from operator import ge, gt, le, lt
from typing import TypeVar

from swapkit.errors import warn

_Default = TypeVar("_Default", bound="int | None")

_COMPARES = {"from": ge, "at least": ge, "to": le, "at most": le, "above": gt, "below": lt}
_LIMIT = re.compile(rf"\b({'|'.join(_COMPARES)}) (-?\d+)")
_NUMBERS = ("a number", "a whole number", "a power of 2")
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def accepts(words: str, value: object) -> bool:
    """Return whether a value is a number as described; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    is_inside = all(_COMPARES[word](value, int(limit)) for word, limit in _LIMIT.findall(words))
    is_power = isinstance(value, int) and value > 0 and not value & (value - 1)
    is_kind = {"number": True, "whole": isinstance(value, int), "power": is_power}
    return is_inside and is_kind[words.split()[1]]


def is_digits(text: str) -> bool:
    """Return whether a text has digits only: `int` accepts signs, underscores and other scripts."""
    return text.isascii() and text.isdecimal()


def read_value(words: str, text: str) -> int | float | bool | str:
    """Return the number that a text is, else the one of the described texts that it is.

    Raises:
        ValueError: it is not as described.

    Example:
        >>> read_value("a whole number from 20 to 512", "64"), read_value("True or False", "True")
        (64, True)
    """
    if not words.startswith(_NUMBERS):
        if text in re.split(", | or ", words):
            return _BOOLS.get(text.lower(), text)
    elif words.startswith("a number") or is_digits(text):
        value = float(text) if words.startswith("a number") else int(text)
        if value != math.inf and accepts(words, value):
            return value
    raise ValueError(text)


def read_variable(
    variables: Mapping[str, str],
    name: str,
    words: str,
    default: _Default,
    parse: Callable[[str], int] = int,
) -> int | _Default:
    """Return the number that a variable is; if it is none as described, the default and a warning.

    Args:
        variables: the environment.
        name: the variable.
        words: describe the numbers that are accepted.
        default: used if the variable is empty or invalid; None: nothing is.
        parse: reads the number.
    """
    text = variables.get(name, "").strip()
    try:
        value = parse(text) if text else None
    except ValueError:  # InvalidArgument is one
        value = None
    if value is not None and accepts(words, value):
        return value
    if text:
        instead = "ignoring it" if default is None else f"using {default}"
        warn(f"{name}={text!r}: expected {words}; {instead}", stacklevel=3)
    return default
