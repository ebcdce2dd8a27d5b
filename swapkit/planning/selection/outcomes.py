"""Instructions for a step, and its outcome."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace


class StepMode(enum.Enum):
    """How a session runs a step."""

    RESCUE = "rescue"  # no plan: rescue when memory fills up
    RECORD = "record"  # the same, and record the step
    FOLLOW = "follow"


class Timing(enum.Enum):
    """How a session measures a step. A device other than the CPU runs asynchronously."""

    HOST = "host"  # from start to end on the host, without waiting for the device
    LEAD = "lead"  # the same, and record the step's end on the device for the next step
    PACE = "pace"  # from the recorded end to the step's own end, for which the host waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """The instruction for the step that begins."""

    mode: StepMode
    trace: Trace | None = None  # to follow: the plan's
    plan: Plan | None = None
    for_any_length: bool = False  # whether the plan is for storages of any size
    timing: Timing = Timing.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a step."""

    seconds: float
    timing: Timing = Timing.HOST  # how `seconds` was measured; on a CPU, HOST is device time
    is_host_bound: bool = False  # whether the host was busy all the time: `Timing.PACE`
    rescues: int = 0
    deviation: str = ""  # where the step left the plan; empty: nowhere
    resized_bytes: int = 0  # of the tensor there, if only its size was unexpected
    trace: Trace | None = None  # the recorded trace
    is_lost: bool = False  # whether the step was recorded, but there is no trace to plan from
    is_heavier: bool = (
        False  # whether more memory was in use before it than before the recorded one
    )
