"""Lists of CPUs as Linux writes them: `0-3,8`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list; empty: the list is empty or is no list.

    Example:
        >>> sorted(parse_cpus("0-2,5")), parse_cpus("N/A")
        ([0, 1, 2, 5], frozenset())
    """
    text = text.strip()
    if not _LIST.fullmatch(text):
        return frozenset()
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs as a list.

    Example:
        >>> format_cpus({0, 1, 2, 5})
        '0-2,5'
    """
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
