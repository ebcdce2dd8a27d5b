"""Trials of the smallest budget: whether a session trains in it from its first step on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._runtime.allocators.installation import ensure_installation
from swapkit.planning.estimates import find_need
from swapkit.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit.ir.traces import Trace

# Steps tried in the smallest budget: so many in the same one, but not more in all.
TRIALS, MOST_TRIALS = 3, 8
# Granules that a budget needs beyond the tried one: in a new process, gaps lie elsewhere.
GAPS = 8


class BudgetNeed(NamedTuple):
    """What steps of a session needed; 0: not tried."""

    budget_bytes: int = 0
    outside_bytes: int = 0  # most in use outside of steps


class BudgetTrial:
    """The first steps of a session in the smallest budget, which grows if a request would fail."""

    profile_steps = MOST_TRIALS + 1  # of the session: it makes no plan

    def __init__(self, trace: Trace, before_bytes: int = 0) -> None:
        """Begin nothing yet.

        Args:
            trace: of such a step, on a device of this process.
            before_bytes: most memory in use before the first step: then there were no states.
        """
        self._installation = ensure_installation(torch.device(trace.device))
        granule_bytes = self._installation.device.backend.granule_bytes
        need = find_need(trace, None, granule_bytes)
        self._outside_bytes = before_bytes and round_up(
            before_bytes + need.optimizer_bytes, granule_bytes
        )
        self._least_bytes = max(need.smallest_bytes, self._outside_bytes)
        self._tried_bytes: list[int] = []  # budgets at the ends of steps

    @contextlib.contextmanager
    def begin(self, begin_session: Callable[[int], object]) -> Iterator[None]:
        """Begin a session for the steps inside.

        Args:
            begin_session: begins one with a limit in bytes.
        """
        pool = self._installation.pool
        pool.trim()
        limit_bytes = max(self._least_bytes, pool.stats()["reserved_bytes.all.current"])
        begin_session(limit_bytes)
        with self._installation.growing():
            yield

    def is_over(self) -> bool:
        """Note that a step ended; return whether enough steps ran in the same budget."""
        self._tried_bytes.append(self._installation.device.budget_bytes)
        steps = len(self._tried_bytes)
        has_held = steps >= TRIALS and len(set(self._tried_bytes[-TRIALS:])) == 1
        return has_held or steps >= MOST_TRIALS

    def result(self) -> BudgetNeed:
        """Return what was tried so far."""
        tried_bytes = max(self._tried_bytes, default=0)
        if tried_bytes:
            tried_bytes += GAPS * self._installation.device.backend.granule_bytes
        return BudgetNeed(tried_bytes, self._outside_bytes)
