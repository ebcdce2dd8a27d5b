"""The jobs of torch's pipeline schedules, read from their lists of actions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.pipelines.orders import BackwardPart, Job, JobOrder
from benchmarks.pipelines.timetables import Pipeline, order_pipeline
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import Phase
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.pipelines.timetables import ScheduleName

# Schedules with one stage on each rank run without a list of actions. The one that torch shows for
# 1F1B counts the last rank's microbatches from 1.
_SINGLE: dict[str, ScheduleName] = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
_WORK = {
    "F": (Phase.FORWARD, BackwardPart.WHOLE),
    "B": (Phase.BACKWARD, BackwardPart.WHOLE),
    "I": (Phase.BACKWARD, BackwardPart.INPUT),
    "W": (Phase.BACKWARD, BackwardPart.WEIGHT),
}
_COMPUTES = re.compile(r"(\d+)([FBIW])(\d+)")
# Sends, receives and FSDP's collectives: the times of jobs follow from who waits for whom.
_OTHER = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")  # the runtime runs the two one after the other


def read_schedule(schedule: object, *, communication_seconds: float = 0.0) -> JobOrder:
    """Return the jobs of a schedule of `torch.distributed.pipelining`.

    Args:
        schedule: the schedule; nothing in it changes.
        communication_seconds: from a job's end to one of another rank that waits for it.

    Raises:
        InvalidArgument: a schedule of an unknown kind.
    """
    for known in type(schedule).__mro__:
        single = _SINGLE.get(known.__name__)
        if single is not None:
            pipeline = Pipeline(
                schedule=single,
                stages=getattr(schedule, "_num_stages"),  # noqa: B009 - torch's private name
                microbatches=getattr(schedule, "_n_microbatches"),  # noqa: B009 - the same
                communication_seconds=communication_seconds,
            )
            return order_pipeline(pipeline)
    actions = getattr(schedule, "pipeline_order", None)
    if actions:
        name = type(schedule).__name__
        return read_actions(actions, communication_seconds=communication_seconds, name=name)
    raise InvalidArgument(
        f"schedule={show(schedule)}: expected a schedule of torch.distributed.pipelining with a "
        "list of actions (pipeline_order), ScheduleGPipe or Schedule1F1B"
    )


def read_actions(
    actions: Mapping[int, Sequence[object]], *, communication_seconds: float = 0.0, name: str = ""
) -> JobOrder:
    """Return the jobs of each rank's list of actions, as in `schedule.pipeline_order`.

    Args:
        actions: for each rank torch's actions, or their texts, such as "3F0"; None: an idle slot.
        communication_seconds: from a job's end to one of another rank that waits for it.
        name: of the schedule.

    Raises:
        InvalidArgument: an unknown action, or the jobs of a pipeline are not complete.
    """
    found = [list(_read_rank(actions[rank])) for rank in sorted(actions)]
    places = [tuple(sorted({place for _, _, place, _ in rank})) for rank in found]
    chunks = {place: chunk for own in places for chunk, place in enumerate(own)}
    jobs = tuple(
        tuple(Job(phase, microbatch, chunks[place], part) for phase, part, place, microbatch in own)
        for own in found
    )
    return JobOrder(
        jobs=jobs,
        places=tuple(places),
        microbatches=1 + max((job.microbatch for own in jobs for job in own), default=0),
        communication_seconds=communication_seconds,
        name=name,
    )


def _read_rank(actions: Sequence[object]) -> Iterator[tuple[Phase, BackwardPart, int, int]]:
    """Yield phase, part, place and microbatch of each job."""
    for action in actions:
        text = "" if action is None else str(action)
        overlapped = _OVERLAPPED.fullmatch(text)
        for each in (overlapped[1] if overlapped else text).split(";"):
            computes = _COMPUTES.fullmatch(each)
            if computes:
                yield (*_WORK[computes[2]], int(computes[1]), int(computes[3]))
            elif each and not _OTHER.fullmatch(each):
                raise InvalidArgument(f"unknown action {each!r} of a pipeline schedule")
