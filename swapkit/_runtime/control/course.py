"""Where a session's search for a plan stands, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.planning.cases import Stage

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where the search for a plan stands."""

    stage: Stage = Stage.STABLE
    plan: Plan | None = None
    trace: Trace | None = None
    machine: Machine | None = None  # that plans are made for
    why_none: str = ""  # why there is no plan and will be none
    replans: int = 0  # how often another plan was needed,
    reason: str = ""  # and why the last time
    pace: float = 1.0  # how long steps have taken, by what was recorded and predicted for them
    # Medians of the latest steps, each from its first forward on: of those of the present kind, to
    # which the plan belongs, and of each other kind.
    step_seconds: float | None = None
    other_step_seconds: tuple[float, ...] = ()
    # The places whose copies were waited for longest, and how long in all, in seconds.
    stalls: tuple[tuple[str, float], ...] = ()
