"""The order of a pipeline's jobs, as torch's schedules have it, and their times."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from benchmarks.pipelines.orders import BackwardPart, Job, JobOrder, JobTiming, count_in_flight
from benchmarks.pipelines.schedules import SCHEDULES, make_schedule
from benchmarks.pipelines.timetables import Pipeline, ScheduleName, order_pipeline
from benchmarks.pipelines.torch_orders import read_actions, read_schedule
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import Phase

F, B = Phase.FORWARD, Phase.BACKWARD
SINGLE: dict[str, ScheduleName] = {"GPipe": "gpipe", "1F1B": "1f1b"}


def seconds_of(order: JobOrder) -> list[float]:
    """A forward takes 1 s, a backward 2 s, each of its parts 1 s."""
    return [
        2.0 if job.phase is B and job.part is BackwardPart.WHOLE else 1.0
        for jobs in order.jobs
        for job in jobs
    ]


def idle_of(order: JobOrder) -> float:
    """The idle seconds of the first stage until the last job of all ends."""
    timing, seconds = JobTiming(order), seconds_of(order)
    return max(timing.run(seconds)) - sum(seconds[: timing.firsts[1]])


@pytest.mark.parametrize("name", SCHEDULES)
def test_order_when_a_schedule_of_torch_then_complete_and_it_runs(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    order = read_schedule(schedule)
    assert order.microbatches == 8
    assert len(order.jobs) == 4
    assert sorted(sum(order.places, ())) == list(range(4 * SCHEDULES[name]))
    ends = JobTiming(order).run(seconds_of(order))
    assert len(ends) == sum(map(len, order.jobs))
    for stage, (first, end) in enumerate(pairwise(JobTiming(order).firsts)):
        assert ends[first:end] == sorted(ends[first:end])
        assert set(count_in_flight(order.jobs[stage])) != {0}


def test_places_when_v_shaped_then_the_first_rank_has_the_first_and_the_last() -> None:
    for name in ("ZBVZeroBubble", "DualPipeV"):
        order = read_schedule(make_schedule(name, ranks=4, microbatches=8))
        assert order.places == ((0, 7), (1, 6), (2, 5), (3, 4))


def test_idle_when_backwards_are_split_then_less() -> None:
    orders = {
        name: read_schedule(make_schedule(name, ranks=4, microbatches=8)) for name in SCHEDULES
    }
    idle = {name: idle_of(order) for name, order in orders.items()}
    assert idle["GPipe"] == idle["1F1B"] == 3 * (1 + 2)
    assert idle["InterleavedZeroBubble"] < idle["Interleaved1F1B"]
    assert idle["ZBVZeroBubble"] < idle["1F1B"]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("microbatches", [4, 8])
def test_order_when_torch_has_no_list_then_derived_as_torch_shows_it(
    name: str, microbatches: int
) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=microbatches)
    derived = read_schedule(schedule)
    for rank in range(3):  # in torch's list for 1F1B, microbatch 0 is missing on the last
        shown = [str(each) for each in schedule._get_pipeline_order()[rank] if each is not None]
        texts = [
            f"{rank}{'F' if job.phase is F else 'B'}{job.microbatch}" for job in derived.jobs[rank]
        ]
        assert [each for each in shown if "REDUCE" not in each] == texts
    pipeline = Pipeline(schedule=SINGLE[name], stages=4, microbatches=microbatches)
    assert derived == order_pipeline(pipeline)


def test_actions_when_texts_with_communication_and_overlap_then_jobs_alone() -> None:
    order = read_actions(
        {
            1: [
                "1UNSHARD",
                "1RECV_F0",
                "1F0",
                "(1F1;1B0)OVERLAP_F_B",
                "1I1",
                "1W1",
                "1REDUCE_GRAD",
            ],
            0: [None, "0F0", "0SEND_F0", "", "0F1", "0B0", "0B1"],
        },
        communication_seconds=0.5,
        name="own",
    )
    assert order.jobs[0] == (Job(F, 0), Job(F, 1), Job(B, 0), Job(B, 1))
    assert order.jobs[1] == (
        *(Job(F, 0), Job(F, 1), Job(B, 0)),
        *(Job(B, 1, part=BackwardPart.INPUT), Job(B, 1, part=BackwardPart.WEIGHT)),
    )
    # By hand: 0 F0 0-1, F1 1-2; 1 F0 1.5-2.5, F1 2.5-3.5, B0 3.5-5.5, I1 5.5-6.5, W1 6.5-7.5;
    # 0 B0 6-8, B1 8-10.
    ends = JobTiming(order).run(seconds_of(order))
    assert ends == [1.0, 2.0, 8.0, 10.0, 2.5, 3.5, 5.5, 6.5, 7.5]


def test_early_when_a_part_of_a_job_needs_no_input_then_it_runs_in_the_bubble() -> None:
    order = read_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    timing, seconds = JobTiming(order), [1.0, 3.0, 1.0, 2.0]  # 1 s of the first 3 s recomputes
    assert max(timing.run(seconds)) == 7.0
    assert max(timing.run(seconds, [0.0, 1.0, 0.0, 0.0])) == 6.0
    assert max(timing.run([1.0, 9.0, 1.0, 2.0], [0.0, 7.0, 0.0, 0.0])) == 10.0  # the bubble is 3 s
    assert timing.arrival(1, timing.run(seconds)) == 4.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_slack_when_a_job_takes_it_then_no_loss_and_with_more_a_loss(name: str) -> None:
    order = read_schedule(make_schedule(name, ranks=2, microbatches=4), communication_seconds=0.25)
    timing, draw = JobTiming(order), random.Random(0)
    seconds = [draw.uniform(0.5, 2.0) for _ in seconds_of(order)]
    step = max(timing.run(seconds))
    for job, slack in enumerate(timing.find_slack(seconds)):
        for more, is_longer in ((slack, False), (slack + 0.01, True)):
            longer = [*seconds[:job], seconds[job] + more, *seconds[job + 1 :]]
            assert (max(timing.run(longer)) > step + 1e-9) is is_longer


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ({0: ["0F0", "0X0"]}, "unknown action '0X0'"),
        ({0: ["0F0"]}, "does not run every chunk"),
        ({0: ["0F0", "0I0"]}, "does not run every chunk"),
        ({0: ["0F0", "0B0", "0B0"]}, "does not run every chunk"),
        ({0: ["0F0", "0B0"], 1: ["2F0", "2B0"]}, "each place of the model"),
    ],
)
def test_actions_when_wrong_then_said(actions: dict[int, list[str]], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_actions(actions)


def test_timing_when_jobs_wait_for_each_other_then_said() -> None:
    order = read_actions({0: ["0B0", "0F0"], 1: ["1F0", "1B0"]})
    with pytest.raises(InvalidArgument, match=r"deadlocks: stages \[0, 1\]"):
        JobTiming(order)


def test_schedule_when_not_one_of_torch_then_said() -> None:
    with pytest.raises(InvalidArgument, match="expected a schedule of torch"):
        read_schedule(SimpleNamespace())
