"""The recorded step of one microbatch of a model chunk, cut into its parts.

This module separates storages that all microbatches share from storages that arrive with each
microbatch. `composing.py` composes the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.pipelines.orders import BackwardPart
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Phase, Storage, Trace

if TYPE_CHECKING:
    from benchmarks.pipelines.orders import Job

_JOB_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
Chunk: TypeAlias = Trace | Sequence[Trace]  # one for all microbatches, or one for each


@dataclass(frozen=True)
class MicrobatchRecording:
    """The recorded step of one microbatch, cut into forward, backward and optimizer."""

    trace: Trace
    forward_end: int
    backward_end: int

    @property
    def end(self) -> int:
        """The number of operators."""
        return len(self.trace.operators)

    def bounds(self, phase: Phase) -> tuple[int, int]:
        """Return the first operator of a phase, and the operator after its last."""
        if phase is Phase.FORWARD:
            return 0, self.forward_end
        if phase is Phase.BACKWARD:
            return self.forward_end, self.backward_end
        return self.backward_end, self.end

    def operators_of(self, job: Job) -> tuple[int, ...]:
        """Return the operators of a job, in order."""
        return self._operators[job.phase, job.part]

    def seconds_of(self, job: Job) -> float:
        """Return the total time of a job's operators."""
        return self._seconds[job.phase, job.part]

    def find(self, operator: int, *, is_split: bool) -> tuple[Phase, BackwardPart, int]:
        """Return the job that runs an operator, and the operator's number in that job.

        `operator` may be the number of operators; it counts as behind the last one.
        """
        if operator < self.forward_end:
            return Phase.FORWARD, BackwardPart.WHOLE, operator
        if operator >= self.backward_end:
            return Phase.OPTIMIZER, BackwardPart.WHOLE, operator - self.backward_end
        if not is_split:
            return Phase.BACKWARD, BackwardPart.WHOLE, operator - self.forward_end
        part, number = self._split[operator - self.forward_end]
        return Phase.BACKWARD, part, number

    @cached_property
    def _operators(self) -> dict[tuple[Phase, BackwardPart], tuple[int, ...]]:
        found = {
            (phase, BackwardPart.WHOLE): tuple(range(*self.bounds(phase))) for phase in _JOB_PHASES
        }
        for part in (BackwardPart.INPUT, BackwardPart.WEIGHT):
            found[Phase.BACKWARD, part] = tuple(
                operator
                for operator, (own, _) in enumerate(self._split, self.forward_end)
                if own is part
            )
        return found

    @cached_property
    def _seconds(self) -> dict[tuple[Phase, BackwardPart], float]:
        operators = self.trace.operators
        return {
            key: sum(operators[each].seconds for each in own)
            for key, own in self._operators.items()
        }

    @cached_property
    def _split(self) -> tuple[tuple[BackwardPart, int], ...]:
        """The part of a split backward that runs each of its operators, and the number there.

        An operator whose results only parameters' gradients are made from can run later than the
        rest. In a first chunk, whose input needs no gradient, that is nearly the whole backward.
        """
        is_late = [False] * (self.backward_end - self.forward_end)
        needed: set[int] = set()  # by operators that cannot run later
        for number in reversed(range(self.forward_end, self.backward_end)):
            operator = self.trace.operators[number]
            late = bool(operator.writes) and needed.isdisjoint(operator.writes)
            is_late[number - self.forward_end] = late and self._leads_to_gradient(number)
            if not is_late[number - self.forward_end]:
                needed.update(operator.reads)
        counts = {BackwardPart.INPUT: 0, BackwardPart.WEIGHT: 0}
        split = []
        for late in is_late:
            part = BackwardPart.WEIGHT if late else BackwardPart.INPUT
            split.append((part, counts[part]))
            counts[part] += 1
        return tuple(split)

    def first_operators(self, index: int, *, is_split: bool) -> tuple[int, ...]:
        """Return the operators of which the earliest is the first with a storage, born in the step.

        Where the recording has no operator that makes it, the first one that reads it does not make
        it either, and another may run before that in a split backward.
        """
        birth = self.trace.storages[index].birth
        firsts = [first for first, _ in self._touches[index].values()] if is_split else []
        return (birth, *firsts)

    def last_operators(self, index: int, *, is_split: bool) -> tuple[int, ...]:
        """Return the operators of which the latest is the last with a storage in its microbatch."""
        last = min(self.trace.storages[index].death, self.backward_end) - 1
        return (last, *(each for _, each in self._touches[index].values())) if is_split else (last,)

    @cached_property
    def _touches(self) -> tuple[dict[BackwardPart, tuple[int, int]], ...]:
        """For each storage the first and last operator of either part of a split backward."""
        found: list[dict[BackwardPart, tuple[int, int]]] = [{} for _ in self.trace.storages]
        for number in range(self.forward_end, self.backward_end):
            operator = self.trace.operators[number]
            part = self._split[number - self.forward_end][0]
            for storage in (*operator.reads, *operator.writes):
                first, _ = found[storage].get(part, (number, number))
                found[storage][part] = first, number
        return tuple(found)

    def _leads_to_gradient(self, number: int) -> bool:
        """Return whether an operator writes a parameter's gradient, or what is read later."""
        storages = self.trace.storages
        return any(
            storages[each].kind is Kind.GRADIENT or number < self.uses[each][1] < self.backward_end
            for each in self.trace.operators[number].writes
        )

    @cached_property
    def uses(self) -> tuple[tuple[int, int], ...]:
        """The first and the last operator that uses each storage; (end, BEFORE): unused."""
        first = [self.end] * len(self.trace.storages)
        last = [BEFORE] * len(self.trace.storages)
        for index, operator in enumerate(self.trace.operators):
            for storage in (*operator.reads, *operator.writes):
                first[storage] = min(first[storage], index)
                last[storage] = index
        return tuple(zip(first, last, strict=True))

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """The storages that all microbatches share."""
        return tuple(
            index for index, each in enumerate(self.trace.storages) if self._is_shared(index, each)
        )

    @cached_property
    def given(self) -> dict[Phase, tuple[int, ...]]:
        """The storages that arrive with a microbatch, by the phase that uses them first."""
        inputs = [
            index
            for index, each in enumerate(self.trace.storages)
            if each.kind is Kind.INPUT and each.birth == BEFORE
        ]
        late = tuple(i for i in inputs if self.forward_end <= self.uses[i][0] < self.end)
        return {
            Phase.FORWARD: tuple(each for each in inputs if each not in late),
            Phase.BACKWARD: late,
        }

    def place_event(self, event: Event, *, is_split: bool) -> tuple[Phase, BackwardPart, int]:
        """Return the job that an event belongs to, and the number there of its operator."""
        at, begin = event.operator, self.forward_end
        if at < begin or (at == begin and event.kind is not EventKind.USE):
            return Phase.FORWARD, BackwardPart.WHOLE, at
        if at >= self.backward_end:  # behind the backward's last operator
            phase, part, number = self.find(self.backward_end - 1, is_split=is_split)
            return phase, part, number + 1 + at - self.backward_end
        return self.find(at, is_split=is_split)

    def _is_shared(self, index: int, storage: Storage) -> bool:
        if storage.birth == BEFORE:
            return storage.kind is not Kind.INPUT
        if storage.birth >= self.backward_end:  # made by the optimizer
            return True
        outlives = storage.death > self.backward_end or storage.death == self.end
        is_gradient = storage.kind is Kind.GRADIENT and storage.birth >= self.forward_end
        return outlives and (is_gradient or self.uses[index][1] >= self.backward_end)


def read_chunks(traces: Sequence[Chunk], microbatches: int) -> list[list[MicrobatchRecording]]:
    """Return for each chunk the recording of each microbatch.

    Raises:
        InvalidArgument: a trace is not the step of one microbatch, or the traces of a chunk do not
            belong together.
    """
    if not traces:
        raise InvalidArgument("expected at least one trace: a stage has at least one chunk")
    chunks = []
    for chunk in traces:
        if isinstance(chunk, Trace):
            chunks.append([_cut(chunk)] * max(1, microbatches))
            continue
        if len(chunk) != microbatches:
            raise InvalidArgument(
                f"expected {microbatches} traces of a chunk, one for each microbatch, got "
                f"{len(chunk)}"
            )
        chunks.append([_cut(each) for each in chunk])
        _check_shared(chunks[-1])
    return chunks


def _check_shared(recordings: Sequence[MicrobatchRecording]) -> None:
    expected = _shared_sizes(recordings[0])
    for number, recorded in enumerate(recordings):
        if _shared_sizes(recorded) != expected:
            raise InvalidArgument(
                f"microbatch {number} differs from the first in parameters, gradients or states. "
                "Record all traces of a chunk with one model."
            )


def _shared_sizes(recorded: MicrobatchRecording) -> list[tuple[int, Kind]]:
    storages = (recorded.trace.storages[index] for index in recorded.shared)
    return [(each.nbytes, each.kind) for each in storages]


def _cut(trace: Trace) -> MicrobatchRecording:
    order = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    counts = [sum(each.phase is phase for each in trace.operators) for phase in order]
    expected = [phase for phase, n in zip(order, counts, strict=True) for _ in range(n)]
    if [each.phase for each in trace.operators] != expected or not all(counts[:2]):
        raise InvalidArgument(
            f"trace {trace.label!r} is not the step of one microbatch: forward, backward, and "
            "optionally optimizer"
        )
    return MicrobatchRecording(trace, counts[0], counts[0] + counts[1])
