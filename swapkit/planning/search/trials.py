"""Simulated choices of actions, which a search compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from swapkit.planning.beside import go_on
from swapkit.planning.bounds.fluid import IDLE
from swapkit.simulation import timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import HostTime
    from swapkit.simulation.problems import Indexes, Problem

    Actions: TypeAlias = NDArray[np.int8]

# Cost of a step that cannot finish, above any step that can; more for a step stuck earlier.
STUCK_SECONDS = 1e12


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One choice of actions and its simulated run. `cost`: seconds, if the step can finish."""

    actions: Actions
    window: int  # a copy back may start at most this many slots before its need
    run: timeline.Run
    cost: float

    @property
    def is_possible(self) -> bool:
        """Whether the step can finish."""
        return self.run.stuck_slot < 0


class Trials:
    """A simulator for one problem on one machine, with a count of simulations."""

    def __init__(self, problem: Problem, machine: Machine, host: HostTime | None = None) -> None:
        self.problem = problem
        self.machine = machine
        self._host = host  # None: the host is never the limit
        self.count = 0
        self._slots = len(problem.slot_seconds)

    def simulate(
        self, actions: Actions, window: int | None = None, *, earlies: Indexes | None = None
    ) -> Trial:
        """Return the trial of these actions, which must not change afterwards.

        Args:
            actions: the action of each item.
            window: most slots before its need that a copy back may start; None: any number.
            earlies: the slots before which items are recomputed ahead of their needs.

        Raises:
            GivenUp: the result of this thread's search is not needed.
        """
        go_on()
        window = self._slots if window is None else window
        self.count += 1
        moments = timeline.Moments(earlies=earlies)
        run = timeline.run(self.problem, self.machine, actions, moments, window=window)
        if run.stuck_slot < 0:
            idle = max(0.0, timeline.find_host_seconds(self._host, actions) - run.seconds)
            return Trial(actions, window, run, run.seconds + IDLE * idle)
        left = (self._slots - run.stuck_slot) / self._slots
        return Trial(actions, window, run, STUCK_SECONDS * (1 + left))

    def keep_all(self) -> Actions:
        """Return the actions that move nothing."""
        return np.zeros(len(self.problem.item_bytes), np.int8)
