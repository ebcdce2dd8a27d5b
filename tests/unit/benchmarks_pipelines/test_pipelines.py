from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest

from benchmarks.pipelines.composing import RECEIVE, compose_pipeline, compose_stages
from benchmarks.pipelines.timetables import Job, Pipeline, count_in_flight, order_jobs, time_jobs
from swapkit.errors import InvalidArgument
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Operator, Phase, Storage, Trace

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
WEIGHT, MOMENT, ACTIVATION, LOSS, GRADIENT, GIVEN = 1000, 4000, 100, 4, 500, 10


def microbatch(forward: float = 1.0, backward: float = 2.0, scale: int = 1) -> Trace:
    """A weight, its moment, an input; one saved activation, a loss, a gradient; an optimizer."""
    operators = (
        Operator(name="up", seconds=forward, phase=FORWARD, reads=(0, 2), writes=(3,)),
        Operator(name="loss", seconds=0.0, phase=FORWARD, reads=(3,), writes=(4,)),
        Operator(name="down", seconds=backward, phase=BACKWARD, reads=(3, 2), writes=(5,)),
        Operator(name="adam", seconds=0.5, phase=Phase.OPTIMIZER, reads=(0, 1, 5), writes=(0, 1)),
    )
    storages = (
        Storage(nbytes=WEIGHT, kind=Kind.STATE, death=4),
        Storage(nbytes=MOMENT, kind=Kind.OPTIMIZER_STATE, death=4),
        Storage(nbytes=GIVEN, kind=Kind.INPUT, death=4, is_saved=True),
        Storage(nbytes=ACTIVATION * scale, birth=0, death=3, is_saved=True, module="layers.0"),
        Storage(nbytes=LOSS, birth=1, death=4),
        Storage(nbytes=GRADIENT, kind=Kind.GRADIENT, birth=2, death=4),
    )
    events = (
        Event(kind=EventKind.SAVE, storage=None, operator=0),
        Event(kind=EventKind.SAVE, storage=3, operator=2),
        Event(kind=EventKind.USE, storage=3, operator=2),
        Event(kind=EventKind.USE, storage=None, operator=3),
    )
    return Trace(operators=operators, storages=storages, events=events, signature="s")


def in_use(trace: Trace) -> list[int]:
    """Bytes there while each operator runs."""
    return [
        sum(each.nbytes for each in trace.storages if each.birth <= k < each.death)
        for k in range(len(trace.operators))
    ]


def jobs_of(trace: Trace) -> list[tuple[Phase, int]]:
    """What the operators that are neither bubbles nor arrivals belong to, each once in a row."""
    named = [
        (each.phase, each.microbatch)
        for each in trace.operators
        if each.phase in {FORWARD, BACKWARD} and each.name != RECEIVE
    ]
    return [job for job, _ in groupby(named)]


def idle_seconds(trace: Trace) -> float:
    return sum(each.seconds for each in trace.operators if each.phase is Phase.IDLE)


@pytest.mark.promise("D9")
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_in_flight_when_1f1b_then_one_for_each_stage_from_here_on(
    stages: int, microbatches: int
) -> None:
    pipeline = Pipeline(schedule="1f1b", stages=stages, microbatches=microbatches)
    counts = [count_in_flight(order_jobs(pipeline, stage)) for stage in range(stages)]
    assert counts == [(min(microbatches, stages - stage),) for stage in range(stages)]


@pytest.mark.promise("D9")
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_in_flight_when_interleaved_then_as_in_megatron(
    stages: int, chunks: int, rounds: int
) -> None:
    pipeline = Pipeline(
        schedule="interleaved", stages=stages, microbatches=rounds * stages, chunks=chunks
    )
    for stage in range(stages):
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
        most = min(warm_up + 1, rounds * stages * chunks)
        first = stages + max(0, most - stages * chunks)
        last = stages + min(0, most - stages * chunks)
        counts = count_in_flight(order_jobs(pipeline, stage))
        assert counts == (first, *[stages] * (chunks - 2), last)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks"),
    [("1f1b", 4, 1), ("interleaved", 4, 3), ("gpipe", 4, 1), ("accumulation", 1, 1)],
)
def test_order_when_any_schedule_then_every_job_once_and_forward_first(
    schedule: str, stages: int, chunks: int
) -> None:
    pipeline = Pipeline(schedule=schedule, stages=stages, microbatches=8, chunks=chunks)  # type: ignore[arg-type]
    for stage in range(stages):
        jobs = order_jobs(pipeline, stage)
        assert set(Counter(jobs).values()) == {1}
        assert len(jobs) == 2 * 8 * chunks
        for job in jobs:
            if job.phase is BACKWARD:
                assert jobs.index(replace(job, phase=FORWARD)) < jobs.index(job)


def test_order_when_interleaved_then_chunks_take_turns_by_rounds() -> None:
    pipeline = Pipeline(schedule="interleaved", stages=2, microbatches=4, chunks=2)
    forwards = [
        (job.microbatch, job.chunk) for job in order_jobs(pipeline, 1) if job.phase is FORWARD
    ]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backwards = [
        (job.microbatch, job.chunk) for job in order_jobs(pipeline, 1) if job.phase is BACKWARD
    ]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


def test_timetable_when_1f1b_then_the_known_length() -> None:
    stages, microbatches, forward, backward, communication = 4, 8, 1.0, 2.0, 0.25
    pipeline = Pipeline(
        schedule="1f1b",
        stages=stages,
        microbatches=microbatches,
        communication_seconds=communication,
    )
    starts = time_jobs(pipeline, lambda _, job: forward if job.phase is FORWARD else backward)
    free = replace(pipeline, communication_seconds=0.0)
    ideal = time_jobs(free, lambda _, job: forward if job.phase is FORWARD else backward)
    assert starts[3][0] == 3 * (forward + communication)
    length = ideal[0][-1] + backward
    assert length == (microbatches + stages - 1) * (forward + backward)
    assert starts[0][-1] + backward >= length + 2 * 3 * communication


def test_timetable_when_one_stage_is_slow_then_the_others_wait_for_it() -> None:
    pipeline = Pipeline(schedule="1f1b", stages=2, microbatches=4)
    starts = time_jobs(pipeline, lambda stage, _: 3.0 if stage else 1.0)
    assert starts[1] == (1.0, 4.0, 7.0, 10.0, 13.0, 16.0, 19.0, 22.0)
    assert starts[0] == (0.0, 1.0, 7.0, 8.0, 13.0, 14.0, 19.0, 25.0)


def test_composed_when_1f1b_then_jobs_in_order_and_one_optimizer() -> None:
    trace = compose_pipeline([microbatch()], schedule="1f1b", stages=3, stage=1, microbatches=3)
    f, b = FORWARD, BACKWARD
    assert jobs_of(trace) == [(f, 0), (f, 1), (b, 0), (f, 2), (b, 1), (b, 2)]
    assert [each.name for each in trace.operators if each.phase is Phase.OPTIMIZER] == ["adam"]
    assert trace.operators[-1].name == "adam"


@pytest.mark.promise("D9")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_when_1f1b_then_that_of_one_microbatch_times_those_in_flight(stage: int) -> None:
    trace = compose_pipeline([microbatch()], schedule="1f1b", stages=4, stage=stage, microbatches=8)
    own = ACTIVATION + LOSS + GIVEN
    assert max(in_use(trace)) == WEIGHT + MOMENT + GRADIENT + (4 - stage) * own


@pytest.mark.promise("D9")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_when_interleaved_then_that_of_one_microbatch_times_those_in_flight(
    stage: int,
) -> None:
    trace = compose_pipeline(
        [microbatch(), microbatch()], schedule="interleaved", stages=4, stage=stage, microbatches=8
    )
    own = ACTIVATION + LOSS + GIVEN
    in_flight = 2 * (4 - stage - 1) + 4 + 1
    assert max(in_use(trace)) == 2 * (WEIGHT + MOMENT + GRADIENT) + in_flight * own


def test_memory_when_gpipe_then_all_microbatches() -> None:
    trace = compose_pipeline([microbatch()], schedule="gpipe", stages=2, stage=1, microbatches=5)
    activations = [each for each in trace.storages if each.nbytes == ACTIVATION]
    assert len(activations) == 5
    assert max(in_use(trace)) == WEIGHT + MOMENT + GRADIENT + 5 * (ACTIVATION + LOSS + GIVEN)


def test_storages_when_composed_then_states_and_gradients_are_there_once() -> None:
    trace = compose_pipeline([microbatch()], schedule="1f1b", stages=2, stage=0, microbatches=4)
    count = Counter(each.nbytes for each in trace.storages)
    assert count == {WEIGHT: 1, MOMENT: 1, GRADIENT: 1, ACTIVATION: 4, LOSS: 4, GIVEN: 4}
    births = [each.birth for each in trace.storages]
    assert births == sorted(births)
    gradient = next(s for s, each in enumerate(trace.storages) if each.nbytes == GRADIENT)
    assert trace.storages[gradient].death == len(trace.operators)
    downs = [each for each in trace.operators if each.name == "down"]
    assert [each.writes for each in downs] == [(gradient,)] * 4
    assert [gradient in each.reads for each in downs] == [False, True, True, True]
    assert gradient in trace.operators[-1].reads


def test_storages_when_composed_then_made_before_they_are_used_and_gone_after() -> None:
    for stage in range(4):
        trace = compose_pipeline(
            [microbatch(), microbatch()],
            schedule="interleaved",
            stages=4,
            stage=stage,
            microbatches=4,
            communication_seconds=0.1,
        )
        check_trace(trace)
        for number, storage in enumerate(trace.storages):
            if storage.birth != BEFORE:
                assert number in trace.operators[storage.birth].writes


def test_inputs_when_composed_then_they_arrive_with_each_microbatch() -> None:
    trace = compose_pipeline([microbatch()], schedule="1f1b", stages=2, stage=1, microbatches=3)
    given = [each for each in trace.storages if each.nbytes == GIVEN]
    assert all(trace.operators[each.birth].name == RECEIVE for each in given)
    assert all(trace.operators[each.death - 1].name == "down" for each in given)
    assert [trace.operators[each.birth].microbatch for each in given] == [0, 1, 2]
    assert all(each.kind is Kind.ACTIVATION and each.is_saved for each in given)


def test_inputs_when_only_backward_reads_them_then_they_arrive_there() -> None:
    recorded = microbatch()
    down = replace(recorded.operators[2], reads=(3, 6))
    operators = (*recorded.operators[:2], down, recorded.operators[3])
    extra = Storage(nbytes=7, kind=Kind.INPUT, death=4)
    recorded = replace(recorded, operators=operators, storages=(*recorded.storages, extra))
    trace = compose_pipeline([recorded], schedule="1f1b", stages=2, stage=0, microbatches=2)
    arrived = [each for each in trace.storages if each.nbytes == 7]
    assert [trace.operators[each.birth].phase for each in arrived] == [BACKWARD, BACKWARD]
    assert [each.death - each.birth for each in arrived] == [2, 2]


def test_inputs_when_only_forward_reads_them_then_they_go_with_it() -> None:
    recorded = microbatch()
    down = replace(recorded.operators[2], reads=(3,))
    recorded = replace(recorded, operators=(*recorded.operators[:2], down, recorded.operators[3]))
    trace = compose_pipeline([recorded], schedule="1f1b", stages=2, stage=0, microbatches=2)
    given = [each for each in trace.storages if each.nbytes == GIVEN]
    assert [trace.operators[each.death - 1].name for each in given] == ["up", "up"]


def test_gradients_when_the_optimizer_drops_them_then_so_it_does() -> None:
    recorded = microbatch()
    step = Operator(name="schedule", seconds=0.0, phase=Phase.OPTIMIZER, reads=(0,), writes=(0,))
    storages = [
        replace(each, death=5) if each.kind in {Kind.STATE, Kind.OPTIMIZER_STATE} else each
        for each in recorded.storages
    ]
    recorded = replace(recorded, operators=(*recorded.operators, step), storages=tuple(storages))
    trace = compose_pipeline([recorded], schedule="1f1b", stages=2, stage=0, microbatches=2)
    gradient = next(each for each in trace.storages if each.kind is Kind.GRADIENT)
    assert gradient.death == len(trace.operators) - 1
    assert trace.operators[-1].name == "schedule"


def test_bubbles_when_1f1b_then_every_stage_takes_as_long() -> None:
    traces = [
        compose_pipeline([microbatch()], schedule="1f1b", stages=4, stage=stage, microbatches=8)
        for stage in range(4)
    ]
    assert [trace.seconds for trace in traces] == pytest.approx([(8 + 3) * 3.0 + 0.5] * 4)
    assert [idle_seconds(trace) for trace in traces] == pytest.approx([3 * 3.0] * 4)
    first = traces[3].operators[0]
    assert (first.phase, first.seconds, first.name) == (Phase.IDLE, 3.0, "")


def test_bubbles_when_accumulating_then_there_are_none() -> None:
    trace = compose_pipeline(
        [microbatch()], schedule="accumulation", stages=1, stage=0, microbatches=3
    )
    f, b = FORWARD, BACKWARD
    assert jobs_of(trace) == [(f, 0), (b, 0), (f, 1), (b, 1), (f, 2), (b, 2)]
    assert idle_seconds(trace) == 0
    assert trace.seconds == 3 * 3.0 + 0.5


def test_bubbles_when_stages_differ_then_the_fast_ones_wait() -> None:
    fast, slow = microbatch(1.0, 1.0), microbatch(3.0, 3.0)
    first, second = compose_stages([[fast], [slow]], schedule="1f1b", microbatches=4)
    assert first.seconds == second.seconds == 26.0 + 0.5
    assert idle_seconds(second) == pytest.approx(1.0 + 1.0)
    assert idle_seconds(first) == pytest.approx(26.0 - 8.0)


def test_events_when_composed_then_each_microbatch_has_its_own() -> None:
    trace = compose_pipeline([microbatch()], schedule="1f1b", stages=2, stage=0, microbatches=2)
    kinds = [each.kind.value for each in trace.events]
    assert kinds == ["save"] * 4 + ["use"] * 4
    named = [each for each in trace.events if each.storage is not None]
    assert [each.storage for each in named] == named_activations(trace) * 2
    assert [each.operator for each in trace.events] == sorted(e.operator for e in trace.events)
    for event in named:
        if event.kind is EventKind.USE:
            assert trace.operators[event.operator].name == "down"
            assert event.storage in trace.operators[event.operator].reads


def named_activations(trace: Trace) -> list[int]:
    return [s for s, each in enumerate(trace.storages) if each.nbytes == ACTIVATION]


def test_lengths_when_microbatches_differ_then_each_has_its_own() -> None:
    lengths = [microbatch(scale=scale, forward=float(scale)) for scale in (1, 3, 2)]
    trace = compose_pipeline([lengths], schedule="accumulation", stages=1, stage=0, microbatches=3)
    assert [each.nbytes for each in trace.storages if each.module] == [100, 300, 200]
    assert sum(each.nbytes == WEIGHT for each in trace.storages) == 1
    assert trace.seconds == 1 + 3 + 2 + 3 * 2.0 + 0.5


def test_lengths_when_parameters_differ_then_it_is_an_error() -> None:
    other = microbatch()
    grown = (replace(other.storages[0], nbytes=WEIGHT + 1), *other.storages[1:])
    pair = [microbatch(), replace(other, storages=grown)]
    with pytest.raises(InvalidArgument, match="differs from the first in parameters"):
        compose_pipeline([pair], schedule="accumulation", stages=1, stage=0, microbatches=2)


@pytest.mark.parametrize(
    ("schedule", "stages", "stage", "microbatches", "text"),
    [
        ("1f1b", 2, 2, 4, "stages 0 to 1"),
        ("1f1b", 2, 0, 0, "at least one stage, microbatch"),
        ("interleaved", 4, 0, 6, "Pass a multiple"),
        ("accumulation", 2, 0, 6, "one stage"),
        ("zigzag", 2, 0, 6, "schedule='zigzag': expected"),
    ],
)
def test_composing_when_numbers_do_not_fit_then_it_is_an_error(
    schedule: str, stages: int, stage: int, microbatches: int, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        compose_pipeline(
            [microbatch()],
            schedule=schedule,  # type: ignore[arg-type]
            stages=stages,
            stage=stage,
            microbatches=microbatches,
        )


def test_composing_when_a_trace_has_several_microbatches_then_it_is_an_error() -> None:
    twice = compose_pipeline(
        [microbatch()], schedule="accumulation", stages=1, stage=0, microbatches=2
    )
    with pytest.raises(InvalidArgument, match="one microbatch"):
        compose_pipeline([twice], schedule="1f1b", stages=2, stage=0, microbatches=2)


def test_jobs_when_compared_then_by_value() -> None:
    assert Job(FORWARD, 1) == Job(FORWARD, 1, 0)
