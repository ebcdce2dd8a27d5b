"""What one training step does, as plain values: operators in order, storages with their lives.

Operators are numbered in the order in which they run, storages in that in which they appear.
Without any plan, storage `s` is in memory while the operators `s.birth <= k < s.death` run;
operator `k` itself takes `workspace_bytes` more while it runs.

A storage that autograd saved is *idle* between the last operator of a forward that touches it, or
runs while its memory is held there, and the first later operator that reads it. Only what is idle
can be swapped or recomputed. What several backward passes use is idle between them, too: it is a
storage of its own for each of these stretches (`passes.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import accumulate

from swapkit.units import format_bytes

VERSION = 1
BEFORE = -1  # the birth of what was there before the step


class Phase(enum.Enum):
    """Which part of a step an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    IDLE = "idle"  # no operator: the device waits for others, as in a pipeline's bubble


class Kind(enum.Enum):
    """What a storage holds."""

    ACTIVATION = "activation"  # made and dropped in the step
    STATE = "state"  # parameters and buffers
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"  # of the step, made outside of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator as it ran.

    `reads` and `writes` are storages; those that it makes are among `writes`. Uses that no operator
    was seen to make, such as an autograd function's, are reads of the next operator that was seen.
    """

    name: str  # such as "aten.mm.default"; empty: idle
    seconds: float
    phase: Phase
    microbatch: int = 0
    module: str = ""  # path of the innermost module that ran it; empty: none
    occurrence: int = 0  # among the operators of this name in this call of the module
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    is_repeatable: bool = False  # gives the same bits when it is run again on the same operands


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The memory of one or more tensors that view it."""

    nbytes: int  # as allocated
    kind: Kind = Kind.ACTIVATION
    birth: int = BEFORE  # the operator that makes it
    death: int = 0  # the first operator that runs without it; the number of operators: it stays
    is_saved: bool = False  # autograd saved it where a plan may decide about it
    module: str = ""  # of a saved one: path of the module that saved it first,
    index: int = 0  # and number among what was first saved in this call of the module
    # The last operator of forward during which others than autograd's graph held it: giving it up
    # frees nothing before. BEFORE: not known to be later than forward's last use.
    held: int = BEFORE
    # The storage whose bytes these are: its death is the birth of this one. Between the two a
    # backward pass has ended, and a later one needs them again. None: these are its own.
    continues: int | None = None

    def keeps_bytes(self, last_use: int, need: int) -> bool:
        """Return whether nobody may overwrite it unseen until `need`, an operator of backward.

        `last_use`: of autograd in backward. States nobody does; what autograd has saved would be
        wrong for plain torch, too. Whatever else is still there belongs to somebody who may, in
        some steps only: the training loop its batch, a module what it remembers.
        """
        if self.kind not in {Kind.ACTIVATION, Kind.INPUT} or last_use >= need:
            return True
        return self.kind is Kind.ACTIVATION and self.is_saved


class EventKind(enum.Enum):
    """What autograd asked our hooks."""

    SAVE = "save"
    USE = "use"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call of a saved-tensor hook. Events are the clock by which a plan is carried out."""

    kind: EventKind
    storage: int | None  # None: something that no plan moves, such as a weight or a small tensor
    operator: int  # the first operator that ran after it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """What the host takes for a step, by what moves."""

    step_seconds: float  # if nothing does
    swap_seconds: float = 0.0  # more for a storage, out and back
    recompute_seconds: float = 0.0  # more for a storage

    def of(self, *, swapped: int, recomputed: int) -> float:
        """Return the seconds of a step in which so many storages move."""
        moved = swapped * self.swap_seconds + recomputed * self.recompute_seconds
        return self.step_seconds + moved


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """One step. `base_bytes`: in use throughout, by nothing that is listed."""

    operators: tuple[Operator, ...]
    storages: tuple[Storage, ...]
    events: tuple[Event, ...] = ()
    base_bytes: int = 0
    device: str = "cpu"
    label: str = ""  # of the model, for people
    signature: str = ""  # of what the step was given: steps with the same one do the same
    step_seconds: float = 0.0  # what such a step takes unrecorded, without a limit; 0: not known
    reserved_ratio: float = 1.0  # most bytes reserved by those in use then
    version: int = VERSION
    # Where that may be longer than what the device takes. Not in the trace's document.
    host: HostTime | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """In one line: the tables have thousands of rows."""
        label = f"{self.label}: " if self.label else ""
        return (
            f"<Trace {label}{len(self.operators)} operators, {len(self.storages)} storages, "
            f"{len(self.events)} events, {self.seconds:.4g} s, "
            f"peak {format_bytes(self.peak_bytes)}>"
        )

    @property
    def seconds(self) -> float:
        """What the operators take together."""
        return sum(operator.seconds for operator in self.operators)

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
