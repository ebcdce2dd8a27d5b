"""One training step as plain values: operators in order, storages with their lifetimes.

Operators are numbered in the order in which they run, storages in the order in which they appear.
Without a plan, storage `s` is in memory while the operators `s.birth <= k < s.death` run. Operator
`k` itself takes `workspace_bytes` more while it runs.

A storage that autograd saved becomes *idle* after the last operator of a forward that touches it,
or that runs while forward code still holds its memory. It is idle until the first later operator
that reads it. Only an idle storage can be swapped or recomputed. A storage that several backward
passes use is also idle between them; each such stretch is a storage of its own (`passes.py`), and
so is each of a weight that may leave.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from swapkit.units import format_bytes

# ---- stages --------------------------------------------------------------------------------------
#
# The place of a rank in a pipeline.


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The stages of a rank, and the pipeline that they belong to."""

    stages: tuple[int, ...]  # in order
    count: int  # of the pipeline's stages, on all ranks
    ranks: tuple[int, ...]  # of the default process group, which have a stage each, or several


def join_places(places: Iterable[StagePlace]) -> StagePlace | None:
    """Return the place of a rank with all these stages; None: none, or of several pipelines."""
    known = set(places)
    if len({(each.count, each.ranks) for each in known}) != 1:
        return None
    first = next(iter(known))
    stages = {stage for each in known for stage in each.stages}
    return StagePlace(tuple(sorted(stages)), first.count, first.ranks)


# ---- traces --------------------------------------------------------------------------------------

VERSION = 1
# An operator without operands: the step waits for a collective, that is, for other ranks.
WAIT = "swapkit.wait"
_WAITS = frozenset(
    {WAIT, "_c10d_functional.wait_tensor.default", "c10d_functional.wait_tensor.default"}
)
# An operator without operands: kernels of a compiled graph, between two saved tensors.
SEGMENT = "swapkit.segment"
# The namespaces of operators that communicate with other ranks.
COMMUNICATION = frozenset(
    {
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
        *("_dtensor", "symm_mem", "fsdp"),
    }
)
BEFORE = -1  # the birth of a storage that existed before the step


class Phase(enum.Enum):
    """The part of a step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    IDLE = "idle"  # no operator: the device waits, as in a pipeline bubble


class Kind(enum.Enum):
    """The kind of data in a storage."""

    ACTIVATION = "activation"  # made and freed in the step
    STATE = "state"  # parameters and buffers
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"  # of the step, made outside the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One recorded run of an operator.

    `reads` and `writes` are storages; `writes` includes the storages that the operator makes. A use
    outside any recorded operator, as in an autograd function, is a read of the next recorded one.
    """

    name: str  # such as "aten.mm.default"; empty: idle
    seconds: float
    phase: Phase
    microbatch: int = 0
    module: str = ""  # path of the innermost module that ran it; empty: none
    occurrence: int = 0  # number among operators of this name in this call of the module
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    is_repeatable: bool = False  # running it again on the same operands gives the same bits
    # What it does, for its time on other hardware; None: not known. An operation on elements of
    # four bytes counts as two.
    flops: float | None = None
    touched_bytes: int | None = None  # of its operands and results; expanded dimensions count once


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The memory of one or more tensors that view it."""

    nbytes: int  # as allocated
    kind: Kind = Kind.ACTIVATION
    birth: int = BEFORE  # the operator that makes it
    death: int = 0  # the first operator that runs without it; the number of operators: it stays
    is_saved: bool = False  # autograd saved it where a plan may decide about it
    module: str = ""  # for a saved storage: path of the module that saved it first,
    index: int = 0  # and number among the storages first saved in this call of the module
    # The last operator of forward during which code other than autograd's graph held the storage:
    # dropping it earlier frees nothing. BEFORE: not known to be later than forward's last use.
    held: int = BEFORE
    # The storage with the same bytes that dies at the birth of this one: the bytes are idle in
    # between. Where the birth is BEFORE, the next step begins with the bytes of that storage, which
    # is there at the end of this one, or of the storage itself. None: the bytes are not those of
    # another, or nobody asked.
    continues: int | None = None

    def keeps_bytes(self, last_use: int, need: int) -> bool:
        """Return whether no code may overwrite the storage unnoticed before `need` in backward.

        `last_use`: autograd's last use in backward. No code overwrites states in between.
        Overwriting bytes that autograd saved would be wrong in plain torch, too. Any other storage
        that still exists has an owner that may overwrite it, perhaps only in some steps: the
        training loop its batch, a module a tensor that it caches.
        """
        if self.kind not in {Kind.ACTIVATION, Kind.INPUT} or last_use >= need:
            return True
        return self.kind is Kind.ACTIVATION and self.is_saved


def is_wait(name: str) -> bool:
    """Return whether an operator of this name only waits for other ranks."""
    return name in _WAITS


def starts_transfer(name: str) -> bool:
    """Return whether an operator of this name starts a transfer between ranks."""
    return name.partition(".")[0] in COMMUNICATION and not is_wait(name)


class EventKind(enum.Enum):
    """The kind of call that autograd makes to a saved-tensor hook."""

    SAVE = "save"
    USE = "use"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call of a saved-tensor hook. Events are the clock by which a session follows a plan."""

    kind: EventKind
    storage: int | None  # None: no plan moves it, as for a weight or a small tensor
    operator: int  # the first operator that ran after it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Host time of a step, depending on how many storages move."""

    step_seconds: float  # if nothing moves
    swap_seconds: float = 0.0  # added per swapped storage, out and back
    recompute_seconds: float = 0.0  # added per recomputed storage

    def of(self, *, swapped: int, recomputed: int) -> float:
        """Return the seconds of a step with this many swapped and recomputed storages."""
        moved = swapped * self.swap_seconds + recomputed * self.recompute_seconds
        return self.step_seconds + moved


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """One step. `base_bytes`: in use throughout, outside the listed storages."""

    operators: tuple[Operator, ...]
    storages: tuple[Storage, ...]
    events: tuple[Event, ...] = ()
    base_bytes: int = 0
    device: str = "cpu"
    label: str = ""  # of the model, for people
    signature: str = ""  # of the step's inputs: steps with equal signatures do the same
    step_seconds: float = 0.0  # of such a step, unrecorded and without a limit; 0: not known
    reserved_ratio: float = 1.0  # most bytes reserved / bytes in use then
    ranks: int | None = None  # that trained together when it was recorded; None: not known
    version: int = VERSION
    # Set where the host may take longer than the device. Not in the trace's document.
    host: HostTime | None = field(default=None, compare=False)
    # Of the rank that recorded it, in the pipeline whose schedule ran. Not in the document, either.
    place: StagePlace | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return one line, because the tables have thousands of rows."""
        label = f"{self.label}: " if self.label else ""
        return (
            f"<Trace {label}{len(self.operators)} operators, {len(self.storages)} storages, "
            f"{len(self.events)} events, {self.seconds:.4g} s, "
            f"peak {format_bytes(self.peak_bytes)}>"
        )

    @property
    def seconds(self) -> float:
        """The sum of the operators' times."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def wait_seconds(self) -> float:
        """The time of all waits for other ranks."""
        return sum(each.seconds for each in self.operators if is_wait(each.name))

    @property
    def bytes_before(self) -> int:
        """The bytes that were in use when the step began."""
        return self.base_bytes + sum(each.nbytes for each in self.storages if each.birth == BEFORE)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, without a plan."""
        return max(self.memory(), default=self.base_bytes)

    def memory(self) -> list[int]:
        """Return the bytes in use while each operator runs, without a plan."""
        changes = [0] * (len(self.operators) + 1)
        for storage in self.storages:
            changes[max(storage.birth, 0)] += storage.nbytes
            changes[storage.death] -= storage.nbytes
        present = accumulate(changes[:-1], initial=self.base_bytes)
        next(present)
        return [
            nbytes + operator.workspace_bytes
            for nbytes, operator in zip(present, self.operators, strict=True)
        ]
