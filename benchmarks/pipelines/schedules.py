"""The jobs of torch's pipeline schedules, without ranks, process groups or models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import schedules

from benchmarks.pipelines.torch_orders import read_schedule

if TYPE_CHECKING:
    from benchmarks.pipelines.orders import JobOrder

# Schedule, and chunks of the model on each rank.
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


class UnusedStage:
    """What a schedule asks of a `PipelineStage` in order to list its actions."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = torch.nn.Identity()
        self.group, self.device, self.has_backward = None, "cpu", True


def make_schedule(name: str, *, ranks: int, microbatches: int, chunks: int = 0) -> Any:  # noqa: ANN401 - of no common type
    """Return torch's schedule; it cannot run. `chunks`: on each rank; 0: as in `SCHEDULES`."""
    kind = getattr(schedules, f"Schedule{name}")
    chunks = chunks or SCHEDULES[name]
    stages = [UnusedStage(index, ranks * chunks, ranks) for index in range(chunks)]
    if not issubclass(kind, schedules.PipelineScheduleMulti):
        return kind(stages[0], microbatches, loss_fn=lambda output, _: output)
    # Sends and receives are not needed, and take torch minutes for hundreds of ranks.
    lists_only = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    return lists_only(stages, microbatches, loss_fn=lambda output, _: output)


def order_of(
    name: str, *, ranks: int, microbatches: int, communication_seconds: float = 0.0
) -> JobOrder:
    """Return the jobs of all ranks."""
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    return read_schedule(schedule, communication_seconds=communication_seconds)
