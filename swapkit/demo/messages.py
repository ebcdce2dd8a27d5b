"""Messages between the demo's parent and its runs: one JSON object per line."""

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
    """The variants of the training."""

    PLAIN = "plain"  # no limit, swapkit's pool
    TORCH = "torch"  # no limit, torch's own allocator: the process does not use swapkit's runtime
    RECOMPUTE = "recompute"  # as PLAIN, with torch.utils.checkpoint around every block
    SWAPKIT = "swapkit"  # swapkit.budget


class RunAction(str, enum.Enum):
    """The parent's commands to a run."""

    BUILD = "build"
    STEP = "step"
    FINISH = "finish"
    TRY = "try"
    QUIT = "quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The specification of a run, without its budget.

    Args:
        label: display name of the run.
        policy: policy of the session, if there is one.
        bytes_per_s: speed of the link to the host, per direction; 0: as fast as memory.
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
    """Parent to run: a command.

    Args:
        action: the action.
        limit_bytes: BUILD: the session's budget. TRY: the pool's limit.
        watched: STEP: record the bytes in use, and report the pool's segments.
    """

    action: RunAction
    limit_bytes: int | None = None
    watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRanges:
    """Run to parent: the pool's current segments, as (address, bytes)."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Run to parent: model, optimizer and session are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Run to parent: one more step is done.

    Args:
        loss: as `float.hex` formats it.
        seconds: duration of the step.
        state_bytes: parameters, gradients and optimizer states.
        reserved_peak_bytes: most bytes that the pool reserved so far; 0 without a pool.
        allocated_peak_bytes: most bytes of the pool in use at once so far; 0 without a pool.
        stage: stage of the session; empty without one.
        series: device bytes over the step, if it was watched.
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
        text: text of the error.
        step: index of the step that failed, from 0.
    """

    text: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Run to parent: summary of the run.

    Args:
        digest: SHA-256 of all parameters, buffers and optimizer states.
        reserved_peak_bytes: most bytes that the pool reserved; 0 without a pool.
        allocated_peak_bytes: most bytes of the pool in use at once; 0 without a pool.
        rescues: allocations that the session rescued.
        late_rescues: rescues since its plan became stable.
        swapped_out_bytes: bytes copied to the host.
        swapped_in_bytes: bytes copied back.
        recomputed_regions: number of recomputations.
        host_peak_bytes: most bytes of host copies at once.
        stall_seconds: time that the training waited for copies.
        stage: stage of the session.
        predicted_share: predicted step time of the plan over the predicted one without a limit.
        bound_share: lower bound of this ratio for all plans.
        torch_version: version of torch.
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
    """Return a message as one line of JSON, without the newline.

    Args:
        message: any message of this module.
    """
    return json.dumps([type(message).__name__, dataclasses.asdict(message)])


def decode(line: str) -> Message:
    """Return the message in a line that `encode` produced.

    Args:
        line: one line.

    Raises:
        GarbledError: the line is not such a message.
    """
    try:
        name, fields = json.loads(line)
        made = _CLASSES[name](**{key: _value(key, value) for key, value in fields.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"not a message of the demo: {line[:200]!r}"
        raise GarbledError(msg) from error
    return made


def _value(key: str, value: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return a field's value in its class's type: enumeration members, tuples for JSON lists."""
    if key in _ENUMS:
        return _ENUMS[key](value)
    return tuple(_value("", each) for each in value) if isinstance(value, list) else value
