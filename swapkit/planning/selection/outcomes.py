"""What is to be done in a step, and what came of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace


class StepMode(enum.Enum):
    """What to do in a step."""

    RESCUE = "rescue"  # no plan: act when memory fills up
    RECORD = "record"  # likewise, and record
    FOLLOW = "follow"


class Timing(enum.Enum):
    """How the time of a step is taken. A device other than the CPU works behind the host's back."""

    HOST = "host"  # from its begin to its end on the host, which waits for nothing
    LEAD = "lead"  # likewise, and its end on the device is noted for the next step
    PACE = "pace"  # from that end to its own: the host waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What to do in the step that begins."""

    mode: StepMode
    trace: Trace | None = None  # to follow: the plan's
    plan: Plan | None = None
    for_any_length: bool = False  # whether the plan is for whatever sizes its storages have
    timing: Timing = Timing.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a step."""

    seconds: float
    timing: Timing = Timing.HOST  # how these were taken; on a CPU the host's is the device's
    is_host_bound: bool = False  # whether the host was busy all the time: `Timing.PACE`
    moving_seconds: float = 0.0  # of these, in moves of free memory to where it was needed
    rescues: int = 0
    deviation: str = ""  # where it left the plan; empty: nowhere
    trace: Trace | None = None  # what was recorded
    is_heavier: bool = (
        False  # whether more memory was in use before it than before the recorded one
    )
