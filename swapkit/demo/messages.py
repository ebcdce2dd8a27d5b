"""What the demo's parent and its runs say to each other: one JSON object per line."""

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any

STABLE = "stable"
"""Stage of a session that follows its plan, or that needs none."""
Series = tuple[tuple[float, int], ...]
"""Device bytes in use over one step: (seconds since the step began, bytes)."""


class RunKind(str, enum.Enum):
    """The ways in which the same training is run."""

    PLAIN = "plain"  # no limit, swapkit's pool
    TORCH = "torch"  # no limit, torch's own allocator: nothing of swapkit is in the process
    RECOMPUTE = "recompute"  # as PLAIN, every block inside torch.utils.checkpoint
    SWAPKIT = "swapkit"  # swapkit.budget


class RunAction(str, enum.Enum):
    """What the parent may ask of a run."""

    BUILD = "build"
    STEP = "step"
    FINISH = "finish"
    TRY = "try"
    QUIT = "quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything that a run needs to know before it starts, but for its budget.

    Args:
        label: name of the run in texts.
        policy: of the session, if there is one.
        bytes_per_s: of the link to the host, in each direction; 0: as fast as memory.
    """

    label: str
    kind: RunKind
    size: str
    seed: int
    threads: int
    parent_pid: int
    policy: str = "auto"
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Parent to run: do this.

    Args:
        action: what to do.
        limit_bytes: BUILD: the session's budget. TRY: the pool's limit.
        watched: STEP: record the bytes in use, and tell where the pool's segments are.
    """

    action: RunAction
    limit_bytes: int | None = None
    watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRanges:
    """Run to parent: the pool's segments are now at these (address, bytes)."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Run to parent: model, optimizer and session are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Run to parent: one more step is done.

    Args:
        loss: as `float.hex` writes it.
        seconds: that the step took.
        state_bytes: parameters, gradients and optimizer states.
        reserved_peak_bytes: the pool's so far; 0 without one.
        allocated_peak_bytes: most bytes of the pool in use at once so far; 0 without one.
        stage: of the session; empty without one.
        series: device bytes of the step, if it was watched.
    """

    loss: str
    seconds: float
    state_bytes: int
    reserved_peak_bytes: int = 0
    allocated_peak_bytes: int = 0
    stage: str = ""
    series: Series = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Run to parent: torch raised its OutOfMemoryError.

    Args:
        text: of the error.
        step: index of the step that failed, from 0.
    """

    text: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Run to parent: what it all came to.

    Args:
        digest: SHA-256 of all parameters, buffers and optimizer states.
        reserved_peak_bytes: the pool's; 0 without one.
        allocated_peak_bytes: the pool's; 0 without one.
        rescues: allocations that the session rescued.
        late_rescues: those since its plan was stable.
        swapped_out_bytes: copied to the host.
        swapped_in_bytes: copied back.
        recomputed_regions: how often something was recomputed.
        host_peak_bytes: most bytes of host copies at once.
        stall_seconds: that the training waited for copies.
        stage: of the session.
        predicted_share: step time of the plan by that without a limit, both as predicted.
        bound_share: the least such share that any plan could have.
        torch_version: of the torch that was used.
    """

    digest: str
    reserved_peak_bytes: int = 0
    allocated_peak_bytes: int = 0
    rescues: int = 0
    late_rescues: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    recomputed_regions: int = 0
    host_peak_bytes: int = 0
    stall_seconds: float = 0.0
    stage: str = ""
    predicted_share: float | None = None
    bound_share: float | None = None
    torch_version: str = ""


Message = RunSpec | Command | SegmentRanges | Built | Stepped | OutOfMemory | Finished
_CLASSES: dict[str, type[Message]] = {
    each.__name__: each
    for each in (RunSpec, Command, SegmentRanges, Built, Stepped, OutOfMemory, Finished)
}


_ENUMS: dict[str, type[enum.Enum]] = {"kind": RunKind, "action": RunAction}


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
