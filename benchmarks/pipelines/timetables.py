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
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Literal

from benchmarks.pipelines.orders import Job, JobOrder, JobTiming, count_in_flight
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Job",
    "Pipeline",
    "ScheduleName",
    "count_in_flight",
    "order_jobs",
    "order_pipeline",
    "time_jobs",
]

ScheduleName = Literal["1f1b", "interleaved", "gpipe", "accumulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The shape of a pipeline. `communication_seconds`: from a job's end to one that waits."""

    schedule: ScheduleName
    stages: int
    microbatches: int
    chunks: int = 1  # of the model in each stage
    communication_seconds: float = 0.0


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


def order_pipeline(pipeline: Pipeline) -> JobOrder:
    """Return the jobs of all stages.

    Raises:
        InvalidArgument: as for `order_jobs`.
    """
    stages, chunks = range(pipeline.stages), range(pipeline.chunks)
    return JobOrder(
        jobs=tuple(order_jobs(pipeline, stage) for stage in stages),
        places=tuple(
            tuple(chunk * pipeline.stages + stage for chunk in chunks) for stage in stages
        ),
        microbatches=pipeline.microbatches,
        communication_seconds=pipeline.communication_seconds,
        name=pipeline.schedule,
    )


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
    order = order_pipeline(pipeline)
    timing = JobTiming(order)
    durations = [seconds(stage, job) for stage, jobs in enumerate(order.jobs) for job in jobs]
    starts = [end - each for end, each in zip(timing.run(durations), durations, strict=True)]
    return tuple(tuple(starts[a:b]) for a, b in pairwise(timing.firsts))


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
