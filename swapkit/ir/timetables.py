"""Pipeline schedules: the order of jobs in each stage, and their times.

A *stage* is a device with one or more *chunks* of the model. Chunk c of stage p comes right before
chunk c of stage p + 1; chunk c of the last stage comes right before chunk c + 1 of the first stage.
A *job* is the forward or the backward of one chunk for one microbatch.

    1f1b          as many forwards as there are later stages, then forwards and backwards in turns,
                  then the remaining backwards
    interleaved   the same with several chunks in a stage, in rounds of as many microbatches as
                  there are stages: Megatron's virtual pipeline
    gpipe         all forwards, then all backwards
    accumulation  no pipeline: a forward and a backward for each microbatch
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from swapkit.errors import InvalidArgument
from swapkit.ir.traces import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ScheduleName = Literal["1f1b", "interleaved", "gpipe", "accumulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The shape of a pipeline. `communication_seconds`: from a job's end to one that waits."""

    schedule: ScheduleName
    stages: int
    microbatches: int
    chunks: int = 1  # of the model in each stage
    communication_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """The forward or the backward of one chunk for one microbatch."""

    phase: Phase
    microbatch: int
    chunk: int = 0


def order_jobs(pipeline: Pipeline, stage: int) -> tuple[Job, ...]:
    """Return the jobs of one stage, in order.

    Raises:
        InvalidArgument: there is no such stage, or the schedule does not work for these numbers.
    """
    _check(pipeline, stage)
    total = pipeline.microbatches * pipeline.chunks
    forwards = [Job(Phase.FORWARD, *_nth(pipeline, n)) for n in range(total)]
    backwards = [
        Job(Phase.BACKWARD, microbatch, pipeline.chunks - 1 - chunk)
        for microbatch, chunk in (_nth(pipeline, n) for n in range(total))
    ]
    ahead = min(total, _forwards_ahead(pipeline, stage))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = tuple(chain.from_iterable(pairs))
    return (*forwards[:ahead], *steady, *backwards[total - ahead :])


def count_in_flight(jobs: Sequence[Job]) -> tuple[int, ...]:
    """Return the number of microbatches in flight for each chunk, at the peak.

    A microbatch counts from the start of its forward to the end of its backward. The peak is the
    first moment with the most microbatches of all chunks together.
    """
    flying = [0] * (1 + max(job.chunk for job in jobs))
    most = tuple(flying)
    for job in jobs:
        if job.phase is Phase.BACKWARD:
            flying[job.chunk] -= 1
            continue
        flying[job.chunk] += 1
        if sum(flying) > sum(most):
            most = tuple(flying)
    return most


def time_jobs(
    pipeline: Pipeline, seconds: Callable[[int, Job], float]
) -> tuple[tuple[float, ...], ...]:
    """Return the start time of each job in each stage, in seconds from the start of the step.

    Args:
        pipeline: the shape of the pipeline.
        seconds: returns the time of a job, given the stage and the job.

    Returns:
        For each stage the starts, in the order of `order_jobs`. Each job starts as soon as the
        previous job is done and its input has arrived.
    """
    orders = [order_jobs(pipeline, stage) for stage in range(pipeline.stages)]
    starts: list[list[float]] = [[] for _ in orders]
    clocks = [0.0] * pipeline.stages
    ends: dict[tuple[int, Job], float] = {}
    left = sum(map(len, orders))
    while left:
        before = left
        for stage, jobs in enumerate(orders):
            for job in jobs[len(starts[stage]) :]:
                arrival = _arrival(pipeline, stage, job, ends)
                if arrival is None:
                    break
                starts[stage].append(max(clocks[stage], arrival))
                clocks[stage] = starts[stage][-1] + seconds(stage, job)
                ends[stage, job] = clocks[stage]
                left -= 1
        if left == before:
            raise AssertionError("the stages of the pipeline deadlock")
    return tuple(map(tuple, starts))


def _check(pipeline: Pipeline, stage: int) -> None:
    if min(pipeline.stages, pipeline.microbatches, pipeline.chunks) < 1:
        raise InvalidArgument(f"expected at least one stage, microbatch and chunk, got {pipeline}")
    if not 0 <= stage < pipeline.stages:
        raise InvalidArgument(f"stage {stage}: the pipeline has stages 0 to {pipeline.stages - 1}")
    if pipeline.schedule == "interleaved":
        if pipeline.microbatches % pipeline.stages:
            raise InvalidArgument(
                f"schedule 'interleaved' takes microbatches in rounds of {pipeline.stages}, one "
                "for each stage. Pass a multiple of that as microbatches, not "
                f"{pipeline.microbatches}."
            )
    elif pipeline.chunks > 1:
        raise InvalidArgument(
            f"schedule {pipeline.schedule!r} has one chunk in a stage, not {pipeline.chunks}. Use "
            "'interleaved' for several chunks."
        )
    if pipeline.schedule == "accumulation" and pipeline.stages > 1:
        raise InvalidArgument(f"schedule 'accumulation' has one stage, not {pipeline.stages}")
    if pipeline.schedule not in {"1f1b", "interleaved", "gpipe", "accumulation"}:
        raise InvalidArgument(
            f"schedule={pipeline.schedule!r}: expected '1f1b', 'interleaved', 'gpipe' or "
            "'accumulation'"
        )


def _nth(pipeline: Pipeline, number: int) -> tuple[int, int]:
    """Return the microbatch and the chunk of the nth forward of a stage."""
    if pipeline.schedule != "interleaved":
        return number, 0
    turn, rest = divmod(number, pipeline.stages * pipeline.chunks)
    return turn * pipeline.stages + rest % pipeline.stages, rest // pipeline.stages


def _forwards_ahead(pipeline: Pipeline, stage: int) -> int:
    """Return the number of forwards that a stage runs before forwards and backwards alternate."""
    behind = pipeline.stages - stage - 1
    if pipeline.schedule == "gpipe":
        return pipeline.microbatches
    if pipeline.schedule == "interleaved":
        return 2 * behind + (pipeline.chunks - 1) * pipeline.stages
    return behind


def _arrival(
    pipeline: Pipeline, stage: int, job: Job, ends: dict[tuple[int, Job], float]
) -> float | None:
    """Return when the input of a job arrives; None: the job that makes it is not timed yet."""
    forward = job.phase is Phase.FORWARD
    position = job.chunk * pipeline.stages + stage
    other = position - 1 if forward else position + 1
    if other < 0:
        return 0.0
    if other == pipeline.stages * pipeline.chunks:  # the loss: right after its own forward
        return ends.get((stage, Job(Phase.FORWARD, job.microbatch, job.chunk)))
    chunk, neighbour = divmod(other, pipeline.stages)
    end = ends.get((neighbour, Job(job.phase, job.microbatch, chunk)))
    if end is None:
        return None
    return end + (pipeline.communication_seconds if neighbour != stage else 0.0)
