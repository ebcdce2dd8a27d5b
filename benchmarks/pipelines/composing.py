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
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.pipelines.microbatches import read_chunks
from benchmarks.pipelines.orders import BackwardPart, Job, JobTiming
from benchmarks.pipelines.timetables import Pipeline, order_jobs, order_pipeline
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE, Event, Kind, Operator, Phase, Storage, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.pipelines.microbatches import Chunk, MicrobatchRecording
    from benchmarks.pipelines.orders import JobOrder
    from benchmarks.pipelines.timetables import ScheduleName

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
    recordings = PipelineRecordings(order_pipeline(pipeline), [chunks] * stages)
    return recordings.compose(stage, recordings.find_bubbles()[stage])


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
    recordings = PipelineRecordings(order_pipeline(pipeline), parts)
    bubbles = recordings.find_bubbles()
    return tuple(recordings.compose(stage, bubbles[stage]) for stage in range(len(parts)))


class PipelineRecordings:
    """The recorded microbatches of all chunks of a pipeline, with the order of its jobs."""

    def __init__(
        self, order: JobOrder, stages: Sequence[Sequence[Sequence[MicrobatchRecording]]]
    ) -> None:
        """`stages`: for each stage, chunk and microbatch the recording: see `read_chunks`.

        Raises:
            InvalidArgument: a stage has another number of chunks; or the order deadlocks.
        """
        for own, places in zip(stages, order.places, strict=True):
            if len(own) != len(places):
                raise InvalidArgument(
                    f"expected a trace for each of {len(places)} chunks of a stage, got {len(own)}"
                )
        self.order, self.stages = order, stages
        self.timing = JobTiming(order)

    def seconds_of(self, stage: int) -> list[float]:
        """Return the recorded duration of each job of a stage."""
        own = self.stages[stage]
        return [own[j.chunk][j.microbatch].seconds_of(j) for j in self.order.jobs[stage]]

    def find_bubbles(
        self, seconds: Sequence[float] | None = None, early: Sequence[float] | None = None
    ) -> list[list[float]]:
        """Return for each stage the idle seconds before each job and before the optimizer.

        Args:
            seconds: duration of each job of all stages, as for `JobTiming.run`; None: as recorded.
            early: as for `JobTiming.run`.
        """
        if seconds is None:
            stages = range(len(self.stages))
            seconds = [each for stage in stages for each in self.seconds_of(stage)]
        ends = self.timing.run(seconds, early)
        last_end, found = max(ends), []
        for first, end in pairwise(self.timing.firsts):
            bubbles, clock = [], 0.0
            for job in range(first, end):
                bubbles.append(ends[job] - seconds[job] - clock)
                clock = ends[job]
            bubbles.append(last_end - clock)
            found.append([each if each >= _LEAST_BUBBLE_SECONDS else 0.0 for each in bubbles])
        return found

    def find_slack(self, least_share: float) -> list[list[float]]:
        """Return for each job of each stage how much longer it could take with no loss.

        Args:
            least_share: of the job's own time; less slack counts as 0.
        """
        stages = range(len(self.stages))
        seconds = [each for stage in stages for each in self.seconds_of(stage)]
        found = [
            slack if slack > least_share * each else 0.0
            for slack, each in zip(self.timing.find_slack(seconds), seconds, strict=True)
        ]
        return [found[first:end] for first, end in pairwise(self.timing.firsts)]

    def compose(self, stage: int, bubbles: Sequence[float], *, keeps_empty: bool = False) -> Trace:
        """Return the whole step of one stage.

        Args:
            stage: the stage.
            bubbles: the idle seconds before each of its jobs and before the optimizer.
            keeps_empty: whether bubbles of no time are operators, too, so that compositions with
                other bubbles have the same operators and storages.
        """
        shown = [each if each > 0 or keeps_empty else None for each in bubbles]
        return _Composition(self.order, stage, self.stages[stage], shown).compose()


class _Composition:
    """The step of one stage, while it is composed."""

    def __init__(
        self,
        order: JobOrder,
        stage: int,
        chunks: Sequence[Sequence[MicrobatchRecording]],
        bubbles: Sequence[float | None],
    ) -> None:
        """`bubbles`: the seconds of the idle operators before each job; None: there is none."""
        self._order, self._stage, self._chunks = order, stage, chunks
        self._jobs = order.jobs[stage]
        self._bubbles = bubbles
        self._split = {
            (j.chunk, j.microbatch) for j in self._jobs if j.part is not BackwardPart.WHOLE
        }
        self._leaders = self._find_leaders()
        self._begins, self._optimizer_begins, self._end = self._lay_out()
        self._storages: list[Storage] = []
        self._names: dict[tuple[int, int], list[int]] = {}  # (chunk, microbatch): new numbers

    def compose(self) -> Trace:
        for chunk, recordings in enumerate(self._chunks):
            leader = self._leaders[chunk]
            for microbatch in sorted(range(len(recordings)), key=lambda each: each != leader):
                self._names[chunk, microbatch] = list(self._add_storages(chunk, microbatch))
        self._number_by_birth()
        traces = [each.trace for chunk in self._chunks for each in chunk]
        order = self._order
        title = (
            f"{order.name} stage {self._stage} of {len(order.jobs)},"
            f" {order.microbatches} microbatches"
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

    def _find_leaders(self) -> list[int]:
        """Return for each chunk the microbatch whose backward makes the gradients."""
        leaders: dict[int, int] = {}
        for job in self._jobs:
            if job.phase is Phase.BACKWARD and job.part is not BackwardPart.INPUT:
                leaders.setdefault(job.chunk, job.microbatch)
        return [leaders[chunk] for chunk in range(len(self._chunks))]

    def _lay_out(self) -> tuple[dict[Job, int], list[int], int]:
        """Return the first operator of each job, of each chunk's optimizer, and the end."""
        begins, position = {}, 0
        for job, bubble in zip(self._jobs, self._bubbles, strict=False):
            recorded = self._recorded(job)
            begins[job] = position + (bubble is not None) + bool(_given(recorded, job))
            position = begins[job] + len(recorded.operators_of(job))
        position += self._bubbles[-1] is not None
        optimizers = []
        for recordings in self._chunks:
            optimizers.append(position)
            first, last = recordings[self._leaders[len(optimizers) - 1]].bounds(Phase.OPTIMIZER)
            position += last - first
        return begins, optimizers, position

    def _place(self, chunk: int, microbatch: int, operator: int) -> int:
        """Return the position of a recorded operator in the composed step."""
        recorded = self._chunks[chunk][microbatch]
        is_split = (chunk, microbatch) in self._split
        phase, part, number = recorded.find(operator, is_split=is_split)
        if phase is Phase.OPTIMIZER:
            return self._optimizer_begins[chunk] + number
        return self._begins[Job(phase, microbatch, chunk, part)] + number

    def _add_storages(self, chunk: int, microbatch: int) -> Iterator[int]:
        """Add the storages of one microbatch; yield the new number of each recorded storage."""
        recorded = self._chunks[chunk][microbatch]
        leader = self._leaders[chunk]
        shared = dict(zip(recorded.shared, self._chunks[chunk][leader].shared, strict=True))
        names: list[int] = []
        for index, storage in enumerate(recorded.trace.storages):
            if index in shared and microbatch != leader:
                names.append(self._names[chunk, leader][shared[index]])
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
        leader = self._leaders[chunk]
        recorded = self._chunks[chunk][leader]
        birth = BEFORE if storage.birth == BEFORE else self._place(chunk, leader, storage.birth)
        if recorded.backward_end < storage.death < recorded.end:
            return birth, self._place(chunk, leader, storage.death - 1) + 1
        return birth, self._end

    def _own_life(self, chunk: int, microbatch: int, index: int) -> tuple[int, int]:
        recorded = self._chunks[chunk][microbatch]
        is_split = (chunk, microbatch) in self._split
        storage = recorded.trace.storages[index]
        lasts = recorded.last_operators(index, is_split=is_split)
        if storage.kind is not Kind.INPUT or storage.birth != BEFORE:
            firsts = recorded.first_operators(index, is_split=is_split)
            birth = min(self._place(chunk, microbatch, each) for each in firsts)
            return birth, 1 + max(self._place(chunk, microbatch, each) for each in lasts)
        begin = self._begins[self._receiver(chunk, microbatch, index)]
        last = min(lasts[0], recorded.uses[index][1])
        ends = [
            self._place(chunk, microbatch, each) + 1 for each in (last, *lasts[1:]) if each >= 0
        ]
        return begin - 1, max(begin, *ends) if ends else begin

    def _receiver(self, chunk: int, microbatch: int, index: int) -> Job:
        """Return the job with which an input of a microbatch arrives."""
        if index not in self._chunks[chunk][microbatch].given[Phase.BACKWARD]:
            return Job(Phase.FORWARD, microbatch, chunk)
        part = BackwardPart.INPUT if (chunk, microbatch) in self._split else BackwardPart.WHOLE
        return Job(Phase.BACKWARD, microbatch, chunk, part)

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
            if bubble is not None:
                yield _idle(bubble, job.microbatch)
            yield from self._operators_of(job)
        if self._bubbles[-1] is not None:
            yield _idle(self._bubbles[-1], self._order.microbatches - 1)
        for chunk in range(len(self._chunks)):
            yield from self._operators_of(Job(Phase.OPTIMIZER, self._leaders[chunk], chunk))

    def _operators_of(self, job: Job) -> Iterator[Operator]:
        recorded, names = self._recorded(job), self._names[job.chunk, job.microbatch]
        given = _given(recorded, job)
        if given:
            yield Operator(
                name=RECEIVE,
                seconds=0.0,
                phase=job.phase,
                microbatch=job.microbatch,
                writes=tuple(names[each] for each in given),
            )
        is_adding = job.phase is Phase.BACKWARD and job.microbatch != self._leaders[job.chunk]
        adds_to = set(recorded.shared) if is_adding else set()
        for number in recorded.operators_of(job):
            operator = recorded.trace.operators[number]
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
            is_split = (job.chunk, job.microbatch) in self._split
            for event in recorded.trace.events:
                phase, part, number = recorded.place_event(event, is_split=is_split)
                if (phase, part) == (job.phase, job.part):
                    storage = None if event.storage is None else names[event.storage]
                    yield replace(event, storage=storage, operator=self._begins[job] + number)


def _given(recorded: MicrobatchRecording, job: Job) -> tuple[int, ...]:
    """Return the storages that arrive right before a job."""
    return () if job.part is BackwardPart.WEIGHT else recorded.given.get(job.phase, ())


def _idle(seconds: float, microbatch: int) -> Operator:
    return Operator(name="", seconds=seconds, phase=Phase.IDLE, microbatch=microbatch)
