"""Plans between two steps, so that the same program takes the same steps each time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from swapkit.planning.beside import at_once

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def planning_at_once() -> Iterator[None]:
    """Let all sessions of the process wait for their plans inside.

    Otherwise training goes on while a plan is made, and how many steps that takes depends on the
    machine. Not for use by several threads at once.

    Example:
        >>> from swapkit.testing import planning_at_once
        >>> with planning_at_once():
        ...     pass  # in sessions, the step after the recorded one follows the first plan
    """
    with at_once():
        yield
