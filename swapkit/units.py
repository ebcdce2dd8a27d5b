"""Parsing and formatting of memory amounts."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
MOST_BYTES = 1 << 60
MOST_DIGITS = 30  # longer numbers are not parsed: they exceed MOST_BYTES in every unit
_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Also accept units without the "b", as many tools do: "10G" is "10GB", "10Gi" is "10GiB".
_FACTORS |= {unit[:-1]: factor for unit, factor in _FACTORS.items() if len(unit) > 1}
# Spaces match in one place only, or long runs of them would take quadratic time.
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:(%|[a-z]+)\s*)?", re.IGNORECASE)
_ACCEPTED = 'bytes (an int), "10GiB", "500MB", "80%", or a fraction such as 0.8'
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


def parse_bytes(
    amount: int | float | str,
    *,
    whole_bytes: int | Callable[[], int] | None = None,
    name: str,
    least: int = 1,
) -> int:
    """Convert an amount that a user gave into bytes.

    Args:
        amount: bytes, text with a unit, or a share of `whole_bytes` (`"80%"`, `0.8`). `"10GB"` and
            `"10G"` are 10 * 10**9 bytes, `"10GiB"` and `"10Gi"` 10 * 2**30.
        whole_bytes: the total that a share refers to, or a function that returns it, which is
            called only for a share; None: shares are not accepted.
        name: name of the argument, for the error text.
        least: smallest accepted amount: 1, or 0 where zero bytes are valid.

    Returns:
        Bytes, at least `least`.

    Raises:
        InvalidArgument: the amount cannot be parsed, is too small, is more than any device has, or
            is a share while `whole_bytes` is None.

    Example:
        >>> parse_bytes("1.5GiB", name="limit")
        1610612736
        >>> parse_bytes(0.5, whole_bytes=1000, name="limit")
        500
    """
    number = _plain_number(amount)
    share = _share_of(amount, number)
    if number == 0 and least == 0:
        nbytes = 0
    elif share is not None:
        nbytes = _apply_share(amount, share, whole_bytes, name)
    elif number is not None:
        nbytes = _whole_number(amount, number, name)
    else:
        nbytes = _parse_text(amount, name)
    if nbytes < least:
        few = "one byte" if least else "no bytes"
        raise InvalidArgument(f"{name}={show(amount)} is less than {few}; expected {_ACCEPTED}")
    if nbytes > MOST_BYTES:
        raise InvalidArgument(
            f"{name}={show(amount)} is more than any device has; expected {_ACCEPTED}"
        )
    return nbytes


def _plain_number(amount: object) -> int | float | None:
    """Return the number given directly or as text without a unit; None: neither."""
    if isinstance(amount, bool):
        return None
    if isinstance(amount, numbers.Integral):
        return int(amount)
    if isinstance(amount, numbers.Real):
        return _as_float(amount)
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if match is None or match[2] is not None:
        return None
    return _read_digits(match[1])


def _as_float(amount: numbers.Real) -> float:
    try:
        return float(amount)
    except OverflowError:  # a `Fraction` with a very long numerator
        return math.inf


def _read_digits(text: str) -> int | float:
    """Return the number; amounts above MOST_BYTES may be replaced by a smaller one above it."""
    if "." in text:
        return min(float(text), 2.0 * MOST_BYTES)
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= MOST_DIGITS else 2 * MOST_BYTES


def _share_of(amount: object, number: float | None) -> float | None:
    """Return the share of the whole that the amount states, or None if it states bytes."""
    if isinstance(number, float) and number <= 1.0:
        return number
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    return float(match[1]) / 100 if match is not None and match[2] == "%" else None


def _apply_share(
    amount: object, share: float, whole_bytes: int | Callable[[], int] | None, name: str
) -> int:
    if whole_bytes is None:
        raise InvalidArgument(f"{name}={show(amount)}: a share is not supported here; pass bytes")
    if not 0 < share <= 1:
        raise InvalidArgument(f"{name}={show(amount)}: a share must be above 0 and at most 100 %")
    return int((whole_bytes if isinstance(whole_bytes, int) else whole_bytes()) * share)


def _whole_number(amount: object, number: int | float, name: str) -> int:
    if isinstance(number, float) and not number.is_integer():
        raise InvalidArgument(f"{name}={show(amount)} is not a whole number; expected {_ACCEPTED}")
    return int(number)


def _parse_text(amount: object, name: str) -> int:
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    factor = _FACTORS.get(match[2].lower()) if match is not None else None
    if match is None or factor is None:
        raise InvalidArgument(f"{name}={show(amount)} is not understood; expected {_ACCEPTED}")
    return int(_read_digits(match[1]) * factor)


def show(value: object) -> str:
    """Return the `repr` of a value, shortened to about one line.

    Example:
        >>> show("10 gallons")
        "'10 gallons'"
    """
    try:
        return _SHOWN.repr(value)
    except ValueError:  # an int with more digits than Python converts to text
        return "a number with too many digits to print"


def round_up(nbytes: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `nbytes`.

    Example:
        >>> round_up(513, 512)
        1024
    """
    return -(-nbytes // unit) * unit


def format_limit(nbytes: int) -> str:
    """Return an amount in the form that a limit accepts, rounded up to whole MiB.

    Example:
        >>> format_limit(1 << 30), format_limit((1 << 20) + 1)
        ('1024MiB', '2MiB')
    """
    return f"{-(-nbytes // MIB)}MiB"


def format_bytes(nbytes: float) -> str:
    """Return an amount of memory in the largest binary unit that keeps it at least 1.

    Example:
        >>> format_bytes(1610612736), format_bytes(-512)
        ('1.50 GiB', '-512 B')
    """
    amount = float(abs(nbytes))
    sign = "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(amount, 2) < 1024:
            return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.2f} {unit}"
        amount /= 1024
    return f"{sign}{amount:.2f} TiB"
