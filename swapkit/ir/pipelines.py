"""The step of a pipeline stage, composed from the recorded step of one microbatch.

The recording has forward, backward and, if there is one, optimizer for one microbatch of one model
chunk, alone on a device. Composing repeats forward and backward in the order of the schedule with
bubbles in between (`timetables.py`), and runs the optimizer once, when all stages are done:

- A storage from before the step, such as a parameter, exists once.
- The first backward makes a gradient, and the others add to it at no cost in time or memory, as
  accumulating kernels do. It lives as long as it did after the recorded backward.
- An input of the step, such as tokens or another stage's activations, arrives with each microbatch
  through an operator `receive` of zero duration, and dies after its last use.
- Any other storage exists once for each microbatch, until the end of its backward at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument
from swapkit.ir.microbatches import read_chunks
from swapkit.ir.timetables import Job, Pipeline, order_jobs, time_jobs
from swapkit.ir.traces import BEFORE, Event, Kind, Operator, Phase, Storage, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.microbatches import Chunk, MicrobatchRecording
    from swapkit.ir.timetables import ScheduleName

RECEIVE = "receive"  # name of the operator through which a microbatch's inputs arrive
_LEAST_BUBBLE_SECONDS = 1e-9  # shorter bubbles are rounding errors


def compose_pipeline(
    traces: Sequence[Chunk],
    *,
    schedule: ScheduleName,
    stages: int,
    stage: int,
    microbatches: int,
    communication_seconds: float = 0.0,
) -> Trace:
    """Return the whole step of one stage of a pipeline whose stages all take the same time.

    Args:
        traces: for each chunk of the stage (one, unless the schedule is interleaved) the recorded
            step of one microbatch; or one trace for each microbatch, where they differ.
        schedule: the order of forwards and backwards.
        stages: number of stages.
        stage: the stage to compose, from 0.
        microbatches: number of microbatches that each stage runs in a step.
        communication_seconds: from the end of a job to the start of one that waits for it.

    Raises:
        InvalidArgument: the schedule does not work for these numbers, or a trace is not the step of
            one microbatch.
    """
    chunks = read_chunks(traces, microbatches)
    pipeline = Pipeline(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        chunks=len(chunks),
        communication_seconds=communication_seconds,
    )
    order_jobs(pipeline, stage)  # reports errors before any job is timed
    starts = time_jobs(pipeline, lambda _, job: chunks[job.chunk][job.microbatch].seconds_of(job))
    last_end = _last_end(pipeline, [chunks] * stages, starts)
    return _Composition(pipeline, stage, chunks, starts[stage], last_end).compose()


def compose_stages(
    traces: Sequence[Sequence[Chunk]],
    *,
    schedule: ScheduleName,
    microbatches: int,
    communication_seconds: float = 0.0,
) -> tuple[Trace, ...]:
    """Return the whole step of every stage, each with the times of its own traces.

    Args:
        traces: for each stage the `traces` argument of `compose_pipeline`.
        schedule: the order of forwards and backwards.
        microbatches: number of microbatches that each stage runs in a step.
        communication_seconds: from the end of a job to the start of one that waits for it.

    Raises:
        InvalidArgument: as in `compose_pipeline`; or the stages have different numbers of chunks.
    """
    parts = [read_chunks(chunks, microbatches) for chunks in traces]
    if len({len(chunks) for chunks in parts}) != 1:
        raise InvalidArgument(
            "expected the same number of chunks in each stage of the pipeline, at least one"
        )
    pipeline = Pipeline(
        schedule=schedule,
        stages=len(parts),
        microbatches=microbatches,
        chunks=len(parts[0]),
        communication_seconds=communication_seconds,
    )
    starts = time_jobs(
        pipeline, lambda stage, job: parts[stage][job.chunk][job.microbatch].seconds_of(job)
    )
    last_end = _last_end(pipeline, parts, starts)
    return tuple(
        _Composition(pipeline, stage, chunks, starts[stage], last_end).compose()
        for stage, chunks in enumerate(parts)
    )


class _Composition:
    """The step of one stage, while it is composed."""

    def __init__(
        self,
        pipeline: Pipeline,
        stage: int,
        chunks: Sequence[Sequence[MicrobatchRecording]],
        starts: Sequence[float],
        last_end: float,
    ) -> None:
        """`starts`: start times of the stage's jobs; `last_end`: end of all stages' last job."""
        self._pipeline, self._stage, self._chunks = pipeline, stage, chunks
        self._jobs = order_jobs(pipeline, stage)
        self._bubbles = self._find_bubbles(starts, last_end)
        self._begins, self._optimizer_begins, self._end = self._lay_out()
        self._storages: list[Storage] = []
        self._names: dict[tuple[int, int], list[int]] = {}  # (chunk, microbatch): new numbers

    def compose(self) -> Trace:
        for chunk, recordings in enumerate(self._chunks):
            for microbatch in range(len(recordings)):
                self._names[chunk, microbatch] = list(self._add_storages(chunk, microbatch))
        self._number_by_birth()
        traces = [each.trace for chunk in self._chunks for each in chunk]
        pipeline = self._pipeline
        title = (
            f"{pipeline.schedule} stage {self._stage} of {pipeline.stages},"
            f" {pipeline.microbatches} microbatches"
        )
        parts = "+".join(dict.fromkeys(each.signature for each in traces))
        return Trace(
            operators=tuple(self._operators()),
            storages=tuple(self._storages),
            events=tuple(self._events()),
            base_bytes=max(each.base_bytes for each in traces),
            device=traces[0].device,
            label=f"{traces[0].label}, {title}" if traces[0].label else title,
            signature=f"{title}: {parts}",
            reserved_ratio=max(each.reserved_ratio for each in traces),
        )

    def _recorded(self, job: Job) -> MicrobatchRecording:
        return self._chunks[job.chunk][job.microbatch]

    def _find_bubbles(self, starts: Sequence[float], last_end: float) -> list[float]:
        """Return the idle seconds before each job, and before the optimizer."""
        bubbles, clock = [], 0.0
        for job, start in zip(self._jobs, starts, strict=True):
            bubbles.append(start - clock)
            clock = start + self._recorded(job).seconds_of(job)
        bubbles.append(last_end - clock)
        return [each if each >= _LEAST_BUBBLE_SECONDS else 0.0 for each in bubbles]

    def _lay_out(self) -> tuple[dict[Job, int], list[int], int]:
        """Return the first operator of each job, of each chunk's optimizer, and the end."""
        begins, position = {}, 0
        for job, bubble in zip(self._jobs, self._bubbles, strict=False):
            recorded = self._recorded(job)
            first, last = recorded.bounds(job.phase)
            begins[job] = position + (bubble > 0) + bool(recorded.given[job.phase])
            position = begins[job] + last - first
        position += self._bubbles[-1] > 0
        optimizers = []
        for recordings in self._chunks:
            optimizers.append(position)
            first, last = recordings[0].bounds(Phase.OPTIMIZER)
            position += last - first
        return begins, optimizers, position

    def _place(self, chunk: int, microbatch: int, operator: int) -> int:
        """Return the position of a recorded operator in the composed step."""
        recorded = self._chunks[chunk][microbatch]
        if operator < recorded.forward_end:
            return self._begins[Job(Phase.FORWARD, microbatch, chunk)] + operator
        if operator < recorded.backward_end:
            begin = self._begins[Job(Phase.BACKWARD, microbatch, chunk)]
            return begin + operator - recorded.forward_end
        return self._optimizer_begins[chunk] + operator - recorded.backward_end

    def _add_storages(self, chunk: int, microbatch: int) -> Iterator[int]:
        """Add the storages of one microbatch; yield the new number of each recorded storage."""
        recorded = self._chunks[chunk][microbatch]
        first = self._chunks[chunk][0]
        shared = dict(zip(recorded.shared, first.shared, strict=True))
        names: list[int] = []
        for index, storage in enumerate(recorded.trace.storages):
            if index in shared and microbatch:
                names.append(self._names[chunk, 0][shared[index]])
                yield names[-1]
                continue
            if index in shared:
                life, held = self._shared_life(chunk, storage), BEFORE
            else:
                life = self._own_life(chunk, microbatch, index)
                held = self._held(chunk, microbatch, storage)
            kind = Kind.ACTIVATION if storage.kind is Kind.INPUT else storage.kind
            former = None if storage.continues is None else names[storage.continues]
            names.append(len(self._storages))
            yield names[-1]
            self._storages.append(
                replace(
                    storage, kind=kind, birth=life[0], death=life[1], held=held, continues=former
                )
            )

    def _held(self, chunk: int, microbatch: int, storage: Storage) -> int:
        if storage.held == BEFORE:
            return BEFORE
        return self._place(chunk, microbatch, storage.held)

    def _shared_life(self, chunk: int, storage: Storage) -> tuple[int, int]:
        recorded = self._chunks[chunk][0]
        birth = BEFORE if storage.birth == BEFORE else self._place(chunk, 0, storage.birth)
        if recorded.backward_end < storage.death < recorded.end:
            return birth, self._place(chunk, 0, storage.death - 1) + 1
        return birth, self._end

    def _own_life(self, chunk: int, microbatch: int, index: int) -> tuple[int, int]:
        recorded = self._chunks[chunk][microbatch]
        storage = recorded.trace.storages[index]
        last = min(storage.death, recorded.backward_end) - 1
        if storage.kind is not Kind.INPUT or storage.birth != BEFORE:
            birth = self._place(chunk, microbatch, storage.birth)
            return birth, self._place(chunk, microbatch, last) + 1
        phase = Phase.BACKWARD if index in recorded.given[Phase.BACKWARD] else Phase.FORWARD
        begin = self._begins[Job(phase, microbatch, chunk)]
        last = min(last, recorded.uses[index][1])
        return begin - 1, max(begin, self._place(chunk, microbatch, last) + 1 if last >= 0 else 0)

    def _number_by_birth(self) -> None:
        order = sorted(range(len(self._storages)), key=lambda each: self._storages[each].birth)
        numbers = {old: new for new, old in enumerate(order)}
        self._storages = [
            each if each.continues is None else replace(each, continues=numbers[each.continues])
            for each in (self._storages[old] for old in order)
        ]
        self._names = {key: [numbers[old] for old in names] for key, names in self._names.items()}

    def _operators(self) -> Iterator[Operator]:
        for job, bubble in zip(self._jobs, self._bubbles, strict=False):
            if bubble > 0:
                yield _idle(bubble, job.microbatch)
            yield from self._operators_of(job)
        if self._bubbles[-1] > 0:
            yield _idle(self._bubbles[-1], self._pipeline.microbatches - 1)
        for chunk in range(len(self._chunks)):
            yield from self._operators_of(Job(Phase.OPTIMIZER, 0, chunk))

    def _operators_of(self, job: Job) -> Iterator[Operator]:
        recorded, names = self._recorded(job), self._names[job.chunk, job.microbatch]
        given = recorded.given.get(job.phase)
        if given:
            yield Operator(
                name=RECEIVE,
                seconds=0.0,
                phase=job.phase,
                microbatch=job.microbatch,
                writes=tuple(names[each] for each in given),
            )
        adds_to = set(recorded.shared) if job.phase is Phase.BACKWARD and job.microbatch else set()
        first, last = recorded.bounds(job.phase)
        for operator in recorded.trace.operators[first:last]:
            added = adds_to.intersection(operator.writes).difference(operator.reads)
            yield replace(
                operator,
                microbatch=job.microbatch,
                reads=tuple(names[each] for each in (*operator.reads, *sorted(added))),
                writes=tuple(names[each] for each in operator.writes),
            )

    def _events(self) -> Iterator[Event]:
        for job in self._jobs:
            recorded, names = self._recorded(job), self._names[job.chunk, job.microbatch]
            shift = self._begins[job] - recorded.bounds(job.phase)[0]
            for event in recorded.trace.events:
                if recorded.job_of(event) is job.phase:
                    storage = None if event.storage is None else names[event.storage]
                    yield replace(event, storage=storage, operator=event.operator + shift)


def _last_end(
    pipeline: Pipeline,
    stages: Sequence[Sequence[Sequence[MicrobatchRecording]]],
    starts: Sequence[Sequence[float]],
) -> float:
    """Return when the last job of all stages ends."""
    ends = []
    for stage, chunks in enumerate(stages):
        job = order_jobs(pipeline, stage)[-1]
        ends.append(starts[stage][-1] + chunks[job.chunk][job.microbatch].seconds_of(job))
    return max(ends)


def _idle(seconds: float, microbatch: int) -> Operator:
    return Operator(name="", seconds=seconds, phase=Phase.IDLE, microbatch=microbatch)
