"""The step of a stage in the order of any schedule, also with split backwards."""

from __future__ import annotations

import pytest

from benchmarks.pipelines.composing import RECEIVE, PipelineRecordings
from benchmarks.pipelines.microbatches import read_chunks
from benchmarks.pipelines.timetables import Pipeline, order_pipeline
from benchmarks.pipelines.torch_orders import read_actions
from swapkit.errors import InvalidArgument
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import Kind, Operator, Phase, Storage, Trace

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def two_layers() -> Trace:
    """Two layers whose backward makes input gradients (dx) and weight gradients (dw) apart."""
    operators = (
        Operator(name="up", seconds=1.0, phase=FORWARD, reads=(0, 2), writes=(4,)),
        Operator(name="up", seconds=1.0, phase=FORWARD, reads=(1, 4), writes=(5,)),
        Operator(name="dw", seconds=1.0, phase=BACKWARD, reads=(3, 4), writes=(6,)),
        Operator(name="dx", seconds=1.0, phase=BACKWARD, reads=(3, 1), writes=(7,)),
        Operator(name="dw", seconds=1.0, phase=BACKWARD, reads=(7, 2), writes=(8,)),
        Operator(name="dx", seconds=1.0, phase=BACKWARD, reads=(7, 0), writes=(9,)),
    )
    storages = (
        Storage(nbytes=1000, kind=Kind.STATE, death=6),
        Storage(nbytes=1000, kind=Kind.STATE, death=6),
        Storage(nbytes=10, kind=Kind.INPUT, death=6, is_saved=True),
        # The gradient of the output: recorded when a weight gradient, which runs later, reads it.
        Storage(nbytes=10, birth=2, death=4),
        Storage(nbytes=100, birth=0, death=3, is_saved=True, module="layers.0"),
        Storage(nbytes=100, birth=1, death=2),
        Storage(nbytes=500, kind=Kind.GRADIENT, birth=2, death=6),
        Storage(nbytes=100, birth=3, death=6),
        Storage(nbytes=500, kind=Kind.GRADIENT, birth=4, death=6),
        Storage(nbytes=100, birth=5, death=6),
    )
    return Trace(operators=operators, storages=storages, signature="s")


def compose_actions(actions: dict[int, list[str]], trace: Trace) -> list[Trace]:
    order = read_actions(actions, name="own")
    chunks = [[read_chunks([trace], order.microbatches)[0] for _ in own] for own in order.places]
    recordings = PipelineRecordings(order, chunks)
    return [recordings.compose(s, own) for s, own in enumerate(recordings.find_bubbles())]


def test_split_when_weight_gradients_run_later_then_what_they_read_lives_until_then() -> None:
    (trace,) = compose_actions({0: ["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]}, two_layers())
    check_trace(trace)
    names = [each.name for each in trace.operators if each.name != RECEIVE]
    assert names == [
        *("up", "up", "dx", "dx"),
        *("up", "up", "dw", "dw"),
        *("dx", "dx", "dw", "dw"),
    ]
    by_microbatch = [each.microbatch for each in trace.operators if each.name == "dw"]
    assert by_microbatch == [0, 0, 1, 1]
    last = max(
        k for k, each in enumerate(trace.operators) if each.name == "dw" and not each.microbatch
    )
    activation = next(each for each in trace.storages if each.is_saved and each.nbytes == 100)
    assert activation.death == last  # the first of its two weight gradients reads it
    assert trace.operators[last - 1].name == "dw"
    gradients = [each for each in trace.storages if each.kind is Kind.GRADIENT]
    assert len(gradients) == 2
    assert {each.death for each in gradients} == {len(trace.operators)}


def test_split_when_half_of_the_microbatches_are_then_the_same_work() -> None:
    whole, split, mixed = (
        compose_actions({0: actions}, two_layers())[0]
        for actions in (
            ["0F0", "0B0", "0F1", "0B1"],
            ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"],
            ["0F0", "0B0", "0F1", "0I1", "0W1"],
        )
    )
    assert whole.seconds == split.seconds == mixed.seconds == 12.0
    for each in (whole, split, mixed):
        check_trace(each)


def test_leader_when_the_last_microbatch_comes_back_first_then_it_makes_the_gradients() -> None:
    (trace,) = compose_actions({0: ["0F0", "0F1", "0B1", "0B0"]}, two_layers())
    check_trace(trace)
    for storage in trace.storages:
        if storage.kind is Kind.GRADIENT:
            assert trace.operators[storage.birth].microbatch == 1


def test_bubbles_when_kept_without_time_then_other_bubbles_give_the_same_storages() -> None:
    order = order_pipeline(Pipeline(schedule="1f1b", stages=2, microbatches=2))
    recordings = PipelineRecordings(order, [read_chunks([two_layers()], 2)] * 2)
    first, other = (recordings.compose(0, [each] * 5, keeps_empty=True) for each in (0.0, 1.5))
    assert first.storages == other.storages
    assert _idle_seconds(first) == 0.0
    assert _idle_seconds(other) == 7.5


def test_chunks_when_fewer_than_the_order_has_then_said() -> None:
    order = order_pipeline(Pipeline(schedule="interleaved", stages=2, microbatches=2, chunks=2))
    with pytest.raises(InvalidArgument, match="a trace for each of 2 chunks"):
        PipelineRecordings(order, [read_chunks([two_layers()], 2)] * 2)


def _idle_seconds(trace: Trace) -> float:
    return sum(each.seconds for each in trace.operators if each.phase is Phase.IDLE)
