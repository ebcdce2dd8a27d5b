"""What is to be done in a step, and what came of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace


class Mode(enum.Enum):
    """What to do in a step."""

    RESCUE = "rescue"  # no plan: act when memory fills up
    RECORD = "record"  # likewise, and record
    FOLLOW = "follow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What to do in the step that begins."""

    mode: Mode
    trace: Trace | None = None  # to follow: the plan's
    plan: Plan | None = None
    for_any_length: bool = False  # whether the plan is for whatever sizes its storages have
    decides: bool = False  # whether its time says which plan is followed: the device's


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a step."""

    seconds: float
    is_host_bound: bool = False  # whether these are the host's: the device has waited for it
    rescues: int = 0
    deviation: str = ""  # where it left the plan; empty: nowhere
    trace: Trace | None = None  # what was recorded
    is_heavier: bool = (
        False  # whether more memory was in use before it than before the recorded one
    )
