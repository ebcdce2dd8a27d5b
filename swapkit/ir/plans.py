"""Plans: a decision for each storage of a trace, and the predicted step."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from swapkit.ir.traces import Trace
from swapkit.units import format_bytes

VERSION = 1


class Action(enum.Enum):
    """The action for a saved storage while it is idle.

    A plan uses one of the first three. A scope never recomputes; only a region or an operator does.
    In C++, `saved_tensors.hpp` has the same actions.
    """

    KEEP = "keep"  # stays on the device
    SWAP = "swap"  # copied out, and copied back ahead of its use
    RECOMPUTE = "recompute"  # dropped; its operator runs again
    AUTO = "auto"  # stays while there is enough memory
    PASS = "pass"  # stays, unless a choice for its operator says otherwise


PLANNED = (Action.KEEP, Action.SWAP, Action.RECOMPUTE)


class Tier(enum.IntEnum):
    """The target of a swap: `sk_tier` of `swapkit_sched.h`. A plan uses HOST or DISK."""

    ANY = 0  # to the host, or to the disk when the host has no room
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision for one storage.

    A swapped storage is copied out as soon as its bytes are final. Its memory must be free before
    operator `release` starts (None: as soon as the copy is done). The copy back starts before
    operator `prefetch`, once there is room; the operator that needs the storage waits for it.
    A recomputed storage is dropped after its last use in forward. Right before it is needed, its
    operator runs again, after the earlier operators whose results are missing; if there is a
    `prefetch`, already before that operator, which waits for other ranks.
    """

    storage: int
    action: Action
    tier: Tier = Tier.HOST
    release: int | None = None
    prefetch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time and memory of a step under a plan. `peak_bytes`: in use on the device.

    `reserved_bytes`: most that is reserved once the step's storages lie at planned addresses.
    `seconds` is device time. Where the host takes longer, the step takes `host_seconds`.
    """

    seconds: float
    peak_bytes: int
    host_peak_bytes: int = 0  # of copies, except those of weights, which are there all the time
    disk_peak_bytes: int = 0
    swapped_bytes: int = 0  # copied back, and before that out, except weights
    recompute_seconds: float = 0.0
    stall_seconds: float = 0.0
    # 0: not known. Not in a document: the value belongs to the session that measured it.
    host_seconds: float = field(default=0.0, compare=False)
    reserved_bytes: int = field(default=0, compare=False)  # the same; 0 if nothing was placed

    @property
    def step_seconds(self) -> float:
        """Time of the step: the longer of device time and host time."""
        return max(self.seconds, self.host_seconds)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Decisions for the storages of one trace; a storage without a decision is kept."""

    decisions: tuple[Decision, ...]
    budget_bytes: int
    policy: str = ""
    signature: str = ""  # of the trace
    prediction: Prediction | None = None
    bound_seconds: float | None = None  # no plan for this budget takes less
    version: int = VERSION
    # The trace it was made for; a session needs it to follow the plan. Not in the plan's document.
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def outline(self) -> frozenset[tuple[int, Action, Tier]]:
        """Return the storages that the plan moves and how, without releases and prefetches."""
        return frozenset((each.storage, each.action, each.tier) for each in self.decisions)

    def count_moved(self) -> tuple[int, int]:
        """Return how many storages are swapped, and how many recomputed."""
        actions = Counter(decision.action for decision in self.decisions)
        return actions[Action.SWAP], actions[Action.RECOMPUTE]

    def __repr__(self) -> str:
        """Return one line, because there may be thousands of decisions."""
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
    """The copies of a swapped storage, in seconds from the start of the step."""

    storage: int
    out_start: float
    out_end: float
    released: float  # when its memory is free
    in_start: float  # when its memory is taken again
    in_end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """A storage that is recomputed right before `operator`, as part of the work there.

    `seconds`: the part of that work that no earlier recomputation there did for it.
    """

    storage: int
    operator: int
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A wait before an operator, and the storage whose copy computing waits for."""

    operator: int
    storage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A simulated step with all its times.

    `starts[k]` to `ends[k]` is operator k with the recomputation right before it, without stalls.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    recomputations: tuple[Recomputation, ...]
    stalls: tuple[Stall, ...]
    prediction: Prediction
