"""Synchronous planning, so that a program takes the same steps in each run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from swapkit.planning.beside import at_once

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def planning_at_once() -> Iterator[None]:
    """Make all sessions of the process wait for their plans inside the block.

    Otherwise training continues while a plan is made, for a number of steps that depends on the
    machine. Not thread-safe.

    Example:
        >>> from swapkit.testing import planning_at_once
        >>> with planning_at_once():
        ...     pass  # in sessions, the step after the recorded one follows the first plan
    """
    with at_once():
        yield
