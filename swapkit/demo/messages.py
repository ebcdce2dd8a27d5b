"""What the demo's parent and its runs say to each other: one JSON object per line."""

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any

from swapkit.demo.sizes import UNTIMED_STEPS

Series = tuple[tuple[float, int], ...]
"""Device bytes in use over one step: (seconds since the step began, bytes)."""


class RunKind(str, enum.Enum):
    """The ways in which the same training is run."""

    PLAIN = "plain"
    POOL = "pool"
    RECOMPUTE = "recompute"
    CAPPED = "capped"
    BUDGETED = "budgeted"


class Action(str, enum.Enum):
    """What the parent may ask of a run."""

    WARM = "warm"
    STEP = "step"
    FINISH = "finish"
    QUIT = "quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything that a run needs to know when it starts.

    Args:
        policy: of the session, if there is one.
        bytes_per_s: of the link to the host, in each direction; 0: as fast as memory.
        untimed: steps at the beginning that are not timed.
    """

    label: str
    kind: RunKind
    budget_bytes: int | None
    size: str
    seed: int
    threads: int
    parent_pid: int
    policy: str = "rescue"
    bytes_per_s: float = 0.0
    untimed: int = UNTIMED_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Parent to run: do this."""

    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRanges:
    """Run to parent: the pool's segments are now at these (address, bytes)."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """Run to parent: the untimed steps are done.

    Args:
        losses: of the steps, as `float.hex` writes them.
        series: device bytes of the last untimed step.
        step_seconds: how long each step took.
        peak_bytes: most tensor bytes alive at once; 0 where the pool counts them.
        pool_peak_bytes: most bytes of the pool in use at once; 0 without one.
        state_bytes: parameters, gradients and optimizer states.
    """

    losses: tuple[str, ...]
    series: Series
    step_seconds: tuple[float, ...]
    peak_bytes: int
    pool_peak_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Run to parent: one more step is done."""

    loss: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Run to parent: torch raised its OutOfMemoryError; no further step is possible.

    Args:
        text: of the error.
        step: index of the step that failed, from 0.
        series: device bytes of that step until it failed.
    """

    text: str
    step: int
    series: Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Run to parent: what it all came to.

    Args:
        digest: SHA-256 of all parameters' bytes in the order of their names.
        reserved_peak_bytes: the pool's; 0 without one.
        allocated_peak_bytes: the pool's; 0 without one.
        rescues: allocations that the session rescued.
        swapped_out_bytes: copied to the host.
        swapped_in_bytes: copied back.
        host_peak_bytes: most bytes of host copies at once.
        stall_seconds: that the training waited for copies.
        stage: of the session.
        late_rescues: rescues in timed steps.
        predicted_share: what the plan was to take, by what the step took without a limit.
        bound_share: what no plan could beat, likewise.
        torch_version: of the torch that was used.
    """

    digest: str
    reserved_peak_bytes: int = 0
    allocated_peak_bytes: int = 0
    rescues: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    host_peak_bytes: int = 0
    stall_seconds: float = 0.0
    stage: str = ""
    late_rescues: int = 0
    predicted_share: float | None = None
    bound_share: float | None = None
    torch_version: str = ""


Message = RunSpec | Command | SegmentRanges | Warmed | Stepped | OutOfMemory | Finished
_CLASSES: dict[str, type[Message]] = {
    each.__name__: each
    for each in (RunSpec, Command, SegmentRanges, Warmed, Stepped, OutOfMemory, Finished)
}


_ENUMS: dict[str, type[enum.Enum]] = {"kind": RunKind, "action": Action}


class GarbledError(ValueError):
    """A line is not one of the messages above."""


def encode(message: Message) -> str:
    """Write a message as one line of JSON, without the line's end.

    Args:
        message: any of this module's.
    """
    return json.dumps([type(message).__name__, dataclasses.asdict(message)])


def decode(line: str) -> Message:
    """Read what `encode` wrote.

    Args:
        line: one line.

    Raises:
        GarbledError: it is something else.
    """
    try:
        name, fields = json.loads(line)
        made = _CLASSES[name](**{key: _value(key, value) for key, value in fields.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"not a message of the demo: {line[:200]!r}"
        raise GarbledError(msg) from error
    return made


def _value(key: str, value: object) -> Any:  # noqa: ANN401 - what JSON holds
    """One field as its class wants it: enumerations by their value, tuples for JSON's lists."""
    if key in _ENUMS:
        return _ENUMS[key](value)
    return tuple(_value("", each) for each in value) if isinstance(value, list) else value
