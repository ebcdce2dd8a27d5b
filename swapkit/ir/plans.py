"""What is done with each storage of a trace, and what is expected of it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace

VERSION = 1


class Action(enum.Enum):
    """What happens to a saved storage while it is idle.

    A plan names one of the first three. A scope never recomputes: that is a region's, or an
    operator's. In C++, `saved.hpp` has the same.
    """

    KEEP = "keep"  # it stays on the device
    SWAP = "swap"  # it is copied out, and back ahead of its use
    RECOMPUTE = "recompute"  # it is dropped, and its operator runs again
    AUTO = "auto"  # it stays while memory lasts
    PASS = "pass"  # it stays, except where a choice for its operator says otherwise


PLANNED = (Action.KEEP, Action.SWAP, Action.RECOMPUTE)


class Tier(enum.IntEnum):
    """Where a swapped storage goes: `sk_tier` of `swapkit_sched.h`. A plan names HOST or DISK."""

    ANY = 0  # to the host, or to the disk when the host has no room
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one storage.

    A swapped storage is copied out as soon as its bytes are final. Its memory has to be gone before
    operator `release` starts (None: whenever the copy is done); the copy back starts before
    operator `prefetch`, as soon as there is room, and is waited for where the storage is needed.
    A recomputed storage is dropped after its last use in forward and made again, by its own
    operator and those before it whose results are not there, right before it is needed.
    """

    storage: int
    action: Action
    tier: Tier = Tier.HOST
    release: int | None = None
    prefetch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step under a plan comes to. `peak_bytes`: in use, of the device.

    `seconds` are the device's. Where the host takes longer, it is what the step takes.
    """

    seconds: float
    peak_bytes: int
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    swapped_bytes: int = 0  # out, and as many back
    recompute_seconds: float = 0.0
    stall_seconds: float = 0.0
    # 0: not known. Not in a document: it is of the session that has measured it.
    host_seconds: float = field(default=0.0, compare=False)

    @property
    def step_seconds(self) -> float:
        """What the step takes: the longer of both."""
        return max(self.seconds, self.host_seconds)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Decisions for the storages of one trace; what is not named is kept."""

    decisions: tuple[Decision, ...]
    budget_bytes: int
    policy: str = ""
    signature: str = ""  # of the trace
    prediction: Prediction | None = None
    bound_seconds: float | None = None  # no plan for this budget takes less
    version: int = VERSION
    # What it was made for, by which a session follows it. Not in the plan's own document.
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def outline(self) -> frozenset[tuple[int, Action, Tier]]:
        """Return what the plan does with each storage, without the times."""
        return frozenset((each.storage, each.action, each.tier) for each in self.decisions)

    def count_moved(self) -> tuple[int, int]:
        """Return how many storages are swapped, and how many recomputed."""
        actions = Counter(decision.action for decision in self.decisions)
        return actions[Action.SWAP], actions[Action.RECOMPUTE]

    def __repr__(self) -> str:
        """In one line: there may be thousands of decisions."""
        counts = Counter(decision.action.value for decision in self.decisions)
        what = ", ".join(f"{action} {count}" for action, count in sorted(counts.items()))
        found = self.prediction
        predicted = (
            "not simulated"
            if found is None
            else f"{found.step_seconds:.4g} s, peak {format_bytes(found.peak_bytes)}"
        )
        policy = self.policy or "of the user"
        budget = format_bytes(self.budget_bytes)
        return f"<Plan {policy}: {what or 'keep all'}; budget {budget}; {predicted}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How a swapped storage moves, in seconds from the start of the step."""

    storage: int
    out_start: float
    out_end: float
    released: float  # when its memory is free
    in_start: float  # when its memory is taken again
    in_end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """How a storage is made again: right before `operator`, among the work done there."""

    storage: int
    operator: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Time that computing waited before an operator, and for which storage's copy."""

    operator: int
    storage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A simulated step: when everything happens.

    `starts[k]` to `ends[k]` is operator k with what is recomputed right before it, without stalls.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    recomputations: tuple[Recomputation, ...]
    stalls: tuple[Stall, ...]
    prediction: Prediction
