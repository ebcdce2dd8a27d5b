"""The environment variables that swapkit reads, in one place.

`MIN_SWAP_TENSOR_SIZE`: saved storages of fewer bytes never move; 1024 at least, and by default.
`SWAP_SIZE_MULTIPLE`: a rescue frees so many times the bytes that are missing; 1 at least, and by
default. A value that is no number, or too small, is replaced by the least, with a warning.

Source:
    MindSpeed, adaptive selective recomputation: both names, defaults and least values.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Smaller storages are never moved: a transfer costs more than they bring.
MIN_SWAP_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment asks for."""

    min_swap_bytes: int = MIN_SWAP_BYTES
    swap_size_multiple: int = 1


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the settings in force now."""
    return Environment(
        min_swap_bytes=_read(variables, "MIN_SWAP_TENSOR_SIZE", _bytes, MIN_SWAP_BYTES),
        swap_size_multiple=_read(variables, "SWAP_SIZE_MULTIPLE", int, 1),
    )


def _bytes(text: str) -> int:
    return parse_bytes(text, name="MIN_SWAP_TENSOR_SIZE")


def _read(variables: Mapping[str, str], name: str, parse: Callable[[str], int], least: int) -> int:
    text = variables.get(name, "").strip()
    if not text:
        return least
    try:
        value = parse(text)
    except ValueError:  # InvalidArgument is one
        value = 0
    if value < least:
        warnings.warn(
            f"{name}={text!r} is not a number of at least {least}: {least} is used", stacklevel=3
        )
    return max(value, least)
