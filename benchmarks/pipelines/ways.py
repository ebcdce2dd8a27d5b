"""The ways in which a stage of a pipeline can run: less memory for more time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.plans import Plan


@dataclass(frozen=True, slots=True)
class Cost:
    """The duration of a job, and the part of it that may run before the job's input arrives."""

    seconds: float
    early_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """One way to run the jobs of a stage. `peak_bytes` holds whenever the jobs run."""

    peak_bytes: int
    costs: tuple[Cost, ...]
    tail_seconds: float = 0.0  # after the last job of all stages, as for the optimizer
    swapped_bytes: int = 0  # in a step
    recompute_seconds: float = 0.0  # in a step
    plan: Plan | None = None  # None: of an estimate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageWays:
    """All ways of one stage. `kinds`: for each job, in order, the number of its cost in a way."""

    ways: tuple[Way, ...]
    kinds: Sequence[int]

    def total_seconds(self, way: int) -> float:
        """Return the time of all jobs."""
        costs = [each.seconds for each in self.ways[way].costs]
        return sum(costs[kind] for kind in self.kinds) + self.ways[way].tail_seconds

    def with_costs(self, way: int, costs: tuple[Cost, ...]) -> StageWays:
        """Return the ways with other costs for one of them."""
        ways = list(self.ways)
        ways[way] = replace(ways[way], costs=costs)
        return replace(self, ways=tuple(ways))
