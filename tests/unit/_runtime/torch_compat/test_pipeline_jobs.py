"""Jobs of torch's pipeline schedules, with one rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from swapkit._runtime.torch_compat import reported_calls
from swapkit.ir.traces import StagePlace

if TYPE_CHECKING:
    from collections.abc import Iterator

MICROBATCHES = 2


class Jobs:
    """Notes jobs."""

    def __init__(self) -> None:
        self.found: list[tuple[int, StagePlace]] = []

    def working(self, microbatch: int, place: StagePlace) -> contextlib.nullcontext[None]:
        self.found.append((microbatch, place))
        return contextlib.nullcontext()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    made = Jobs()
    reported_calls.add(made)
    yield made
    reported_calls.remove(made)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_schedule() -> ScheduleGPipe:
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    return ScheduleGPipe(stage, MICROBATCHES, lambda output, target: (output - target).sum())


def step(schedule: ScheduleGPipe) -> None:
    schedule.step(torch.ones(MICROBATCHES, 4), target=torch.ones(MICROBATCHES, 4))


def test_jobs_when_a_schedule_runs_then_each_has_its_microbatch_and_place(jobs: Jobs) -> None:
    step(make_schedule())
    place = StagePlace((0,), 1, (0,))
    assert jobs.found == [(0, place), (1, place)] * 2


def test_jobs_when_the_process_group_is_gone_then_they_run_all_the_same(jobs: Jobs) -> None:
    schedule = make_schedule()
    step(schedule)
    dist.destroy_process_group()
    jobs.found.clear()
    step(schedule)
    assert [place.ranks for _, place in jobs.found] == [()] * 4
