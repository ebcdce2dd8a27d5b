"""The jobs of a pipeline in order, and their times.

A *stage* is a device with one or more *chunks* of the model; torch calls a device a rank and a
chunk a stage. Each chunk has a *place* in the model: torch's index of a stage. A *job* is the
forward of one chunk for one microbatch, or its backward. A schedule may split a backward: the part
that makes the gradient of the chunk's input, which the place before waits for, and the part that
makes the gradients of parameters, which nobody waits for.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument
from swapkit.ir.traces import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class BackwardPart(enum.Enum):
    """The part of a backward; a forward is always whole."""

    WHOLE = "whole"
    INPUT = "input"  # the gradient of the chunk's input
    WEIGHT = "weight"  # the gradients of parameters


@dataclass(frozen=True, slots=True)
class Job:
    """The forward or the backward of one chunk for one microbatch, or a part of the backward."""

    phase: Phase
    microbatch: int
    chunk: int = 0
    part: BackwardPart = BackwardPart.WHOLE


_FORWARD, _BACKWARD, _WEIGHT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """What each stage of a pipeline runs."""

    jobs: tuple[tuple[Job, ...], ...]  # of each stage, in order
    places: tuple[tuple[int, ...], ...]  # of each stage's chunks in the model
    microbatches: int
    communication_seconds: float = 0.0  # from a job's end to one of another stage that waits for it
    name: str = ""  # of the schedule

    def __post_init__(self) -> None:
        """Check that every job is there once.

        Raises:
            InvalidArgument: a place or a job is missing, or is there twice.
        """
        places = sorted(place for stage in self.places for place in stage)
        if len(self.places) != len(self.jobs) or places != list(range(len(places))):
            raise InvalidArgument(
                f"places={self.places}: expected each place of the model, from 0, in one stage"
            )
        for stage, jobs in enumerate(self.jobs):
            self._check(stage, jobs)

    def _check(self, stage: int, jobs: Sequence[Job]) -> None:
        counts = Counter((job.phase, job.part, job.chunk) for job in jobs)
        chunks, each = range(len(self.places[stage])), self.microbatches
        for chunk in chunks:
            whole = counts.pop((Phase.BACKWARD, BackwardPart.WHOLE, chunk), 0)
            forward = counts.pop((Phase.FORWARD, BackwardPart.WHOLE, chunk), 0)
            parts = {
                counts.pop((Phase.BACKWARD, p, chunk), 0)
                for p in (BackwardPart.INPUT, BackwardPart.WEIGHT)
            }
            if forward != each or parts != {each - whole}:
                break
        else:
            if not counts and len(set(jobs)) == len(jobs):
                return
        raise InvalidArgument(
            f"stage {stage} of the pipeline does not run every chunk's forward and backward once "
            f"for each of {each} microbatches"
        )


def count_in_flight(jobs: Sequence[Job]) -> tuple[int, ...]:
    """Return the number of microbatches in flight for each chunk, at the peak.

    A microbatch counts from the start of its forward to the end of its backward. The peak is the
    first moment with the most microbatches of all chunks together.
    """
    flying = [0] * (1 + max(job.chunk for job in jobs))
    most = tuple(flying)
    for job in jobs:
        if job.phase is Phase.FORWARD:
            flying[job.chunk] += 1
            if sum(flying) > sum(most):
                most = tuple(flying)
        elif job.part is not BackwardPart.INPUT:
            flying[job.chunk] -= 1
    return most


def _source_of(kind: int, place: int, last: int) -> tuple[int, int]:
    """Return kind and place of the job that a job waits for; place -1: it waits for none."""
    if kind == _FORWARD:
        return _FORWARD, place - 1
    if kind == _WEIGHT:
        return _BACKWARD, place
    # The loss comes right after its own forward.
    return (_FORWARD, place) if place == last else (_BACKWARD, place + 1)


class JobTiming:
    """The times of a pipeline's jobs, for any number of sets of durations.

    A job starts as soon as the stage's previous job is done and its input has arrived. A part of
    it that does not need the input, such as recomputing for a backward, may run before that.
    """

    def __init__(self, order: JobOrder) -> None:
        """Sort the jobs so that each comes after those it waits for.

        Raises:
            InvalidArgument: some jobs wait for each other.
        """
        self.order = order
        self.firsts = [0]  # number of each stage's first job among all jobs; then of all jobs
        for jobs in order.jobs:
            self.firsts.append(self.firsts[-1] + len(jobs))
        self._inputs = self._find_inputs()
        self._sorted = self._sort()

    def run(self, seconds: Sequence[float], early: Sequence[float] | None = None) -> list[float]:
        """Return the end of each job, in seconds from the start of the step.

        Args:
            seconds: durations of all stages' jobs, stage by stage, in order.
            early: the part of each duration that may run before the input arrives; None: nothing.
        """
        # Every job has a job before it and an input: -1, with the end 0, if there is none.
        ends = [0.0] * (len(seconds) + 1)
        if early is None:
            for job, before, source, delay in self._sorted:
                ready, arrival = ends[before], ends[source] + delay
                ends[job] = (ready if ready > arrival else arrival) + seconds[job]
        else:
            for job, before, source, delay in self._sorted:
                ready, arrival = ends[before], ends[source] + delay - early[job]
                ends[job] = (ready if ready > arrival else arrival) + seconds[job]
        ends.pop()
        return ends

    def find_slack(self, seconds: Sequence[float]) -> list[float]:
        """Return for each job how much longer it could take, alone, with no loss for the step.

        Args:
            seconds: as for `run`.
        """
        ends = self.run(seconds)
        latest = [max(ends)] * (len(seconds) + 1)
        for job, before, source, delay in reversed(self._sorted):
            start = latest[job] - seconds[job]
            latest[before] = min(latest[before], start)
            latest[source] = min(latest[source], start - delay)
        return [late - end for late, end in zip(latest, ends, strict=False)]

    def arrival(self, job: int, ends: Sequence[float]) -> float:
        """Return when a job's input arrived; `job` is its number among all jobs."""
        source, delay = self._inputs[job]
        return ends[source] + delay if source >= 0 else 0.0

    def _find_inputs(self) -> list[tuple[int, float]]:
        """Return for each job the job that makes its input (-1: none), and the delay."""
        order = self.order
        last = sum(map(len, order.places)) - 1
        stage_of = {place: stage for stage, own in enumerate(order.places) for place in own}
        numbers = {self._key(*each): number for number, (each, _) in enumerate(self._list_keys())}
        found = []
        for (kind, place, microbatch), stage in self._list_keys():
            kind, other = _source_of(kind, place, last)  # noqa: PLW2901 - of the job waited for
            if other < 0:
                found.append((-1, 0.0))
                continue
            delay = 0.0 if stage_of[other] == stage else order.communication_seconds
            found.append((numbers[self._key(kind, other, microbatch)], delay))
        return found

    def _key(self, kind: int, place: int, microbatch: int) -> int:
        return (place * self.order.microbatches + microbatch) * 3 + kind

    def _list_keys(self) -> Iterator[tuple[tuple[int, int, int], int]]:
        """Yield kind, place and microbatch of each job, and its stage."""
        for stage, (jobs, places) in enumerate(
            zip(self.order.jobs, self.order.places, strict=True)
        ):
            for job in jobs:
                kind = _FORWARD if job.phase is Phase.FORWARD else _BACKWARD
                if job.part is BackwardPart.WEIGHT:
                    kind = _WEIGHT
                yield (kind, places[job.chunk], job.microbatch), stage

    def _sort(self) -> list[tuple[int, int, int, float]]:
        """Return job, job before it on its stage, input and delay, each after those it names."""
        ordered: list[tuple[int, int, int, float]] = []
        stages = len(self.order.jobs)
        following, done = self.firsts[:-1], [False] * self.firsts[-1]
        waiting: dict[int, int] = {}  # a job that is not done, and the stage that waits for it
        ready = list(range(stages))
        while ready:
            stage = ready.pop()
            first, job, end = self.firsts[stage], following[stage], self.firsts[stage + 1]
            while job < end:
                source, delay = self._inputs[job]
                if source >= 0 and not done[source]:
                    waiting[source] = stage
                    break
                ordered.append((job, job - 1 if job > first else -1, source, delay))
                done[job] = True
                waiter = waiting.pop(job, -1)
                if waiter >= 0:
                    ready.append(waiter)
                job += 1
            following[stage] = job
        if len(ordered) < len(done):
            stuck = [stage for stage in range(stages) if following[stage] < self.firsts[stage + 1]]
            raise InvalidArgument(f"the pipeline deadlocks: stages {stuck[:8]} wait for each other")
        return ordered
