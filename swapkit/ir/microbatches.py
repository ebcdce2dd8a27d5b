"""The recorded step of one microbatch of a model chunk, cut into its parts.

This module separates storages that all microbatches share from storages that arrive with each
microbatch. `pipelines.py` composes the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Phase, Storage, Trace

if TYPE_CHECKING:
    from swapkit.ir.timetables import Job

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

    def seconds_of(self, job: Job) -> float:
        """Return the total time of a job's operators."""
        return self._forward_seconds if job.phase is Phase.FORWARD else self._backward_seconds

    @cached_property
    def _forward_seconds(self) -> float:
        return sum(each.seconds for each in self.trace.operators[: self.forward_end])

    @cached_property
    def _backward_seconds(self) -> float:
        part = self.trace.operators[self.forward_end : self.backward_end]
        return sum(each.seconds for each in part)

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

    def job_of(self, event: Event) -> Phase:
        """Return the phase of the job that an event belongs to."""
        is_backward = event.operator > self.forward_end or (
            event.operator == self.forward_end and event.kind is EventKind.USE
        )
        return Phase.BACKWARD if is_backward else Phase.FORWARD

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
