from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import _planner_instances as instances
from benchmarks import _planner_measures as measures
from benchmarks import _planner_models as models
from benchmarks import planner
from benchmarks._planner_instances import Part, Workload
from benchmarks._planner_random import make_random_step
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import BEFORE, Kind, Operator, Phase, Storage, Trace
from swapkit.simulation.lowering import lower

if TYPE_CHECKING:
    from pathlib import Path

TINY = Part(shape="tiny", layers=2, tokens=256)


def test_instances_when_listed_then_at_least_sixty_of_all_kinds() -> None:
    listed = list(instances.list_instances())
    names = [each.name for each in listed]
    assert len(set(names)) == len(names) >= 60
    for word in ("7B", "13B", "70B", "128k", "1F1B P4", "1F1B P8", "interleaved", "MoE", "lengths"):
        assert any(word in name for name in names), word
    assert {each.link_gb_per_s for each in listed} == {20, 50}
    shares = [each.share for each in listed]
    assert min(shares) <= 0.07
    assert max(shares) >= 0.8


def test_recording_when_a_part_is_recorded_then_it_is_what_runs_on_an_accelerator() -> None:
    trace = instances.record_part(TINY)
    check_trace(trace)
    names = [each.name for each in trace.operators]
    assert sum("scaled_dot_product_flash_attention.default" in name for name in names) == 2
    assert not any("bmm" in name for name in names)
    gradients = [each for each in trace.storages if each.kind is Kind.GRADIENT]
    assert gradients
    assert all(each.birth == BEFORE for each in gradients)


def test_recording_when_shorter_then_the_parameters_are_the_same() -> None:
    long, short = instances.record_part(TINY), instances.record_part(replace(TINY, length=128))
    sizes = [
        [each.nbytes for each in trace.storages if each.kind is Kind.STATE]
        for trace in (long, short)
    ]
    assert sizes[0] == sizes[1]
    assert short.seconds < long.seconds


def test_composing_when_lengths_vary_then_the_step_is_sound() -> None:
    workload = Workload(name="lengths", part=TINY, microbatches=2, lengths=(256, 128))
    trace = instances.compose(workload)
    check_trace(trace)
    assert {each.microbatch for each in trace.operators} == {0, 1}


def test_experts_when_routed_then_every_row_goes_to_one() -> None:
    shape = models.SHAPES["tiny-moe"]
    model = models.build(models.cut_layers(shape, 1), tokens=64)
    experts = next(each for each in model.modules() if isinstance(each, models.Experts))
    routed = [experts.route(101) for _ in range(5)]
    assert all(sum(sizes) == 101 and min(sizes) > 0 for sizes in routed)
    assert len({tuple(sizes) for sizes in routed}) > 1


def test_inputs_when_a_part_is_inner_then_it_takes_and_gives_states() -> None:
    shape = models.cut_layers(models.SHAPES["tiny"], 1)
    model = models.build(shape, tokens=64, is_first=False, is_last=False)
    inputs = models.make_inputs(model, shape.width, batch=2, tokens=64)
    models.run(model, inputs)
    assert inputs["x"].grad.shape == (2, 64, shape.width)
    assert inputs["x"].device == torch.device("meta")


def small_trace() -> Trace:
    operators = (
        Operator(name="embed", seconds=1.0, phase=Phase.FORWARD, module="embedding", writes=(1,)),
        Operator(
            name="up", seconds=2.0, phase=Phase.FORWARD, module="layers.0.up", reads=(1,),
            writes=(2,), workspace_bytes=50,
        ),
        Operator(name="down", seconds=4.0, phase=Phase.BACKWARD, reads=(1, 2)),
    )  # fmt: skip
    storages = (
        Storage(nbytes=1000, kind=Kind.STATE, death=3),
        Storage(nbytes=10, birth=0, death=3),
        Storage(nbytes=100, birth=1, death=3),
    )
    return Trace(operators=operators, storages=storages, base_bytes=7)


def test_full_recompute_when_measured_then_layers_run_twice() -> None:
    assert measures.full_recompute_seconds(small_trace()) == 7.0 + 2.0


def test_memory_when_measured_then_with_workspace() -> None:
    assert instances.measure_memory(small_trace()) == (1007, 1007 + 10 + 100 + 50)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_when_made_then_sound_and_small(seed: int) -> None:
    trace, machine = make_random_step(seed, 64)
    check_trace(trace)
    assert 0 < len(lower(trace).item_bytes) <= 64
    _, peak = instances.measure_memory(trace)
    assert machine.budget_bytes < peak
    assert make_random_step(seed, 64) == (trace, machine)


def test_misses_when_above_a_goal_or_below_a_bound_then_named() -> None:
    assert planner.find_misses({"gap_median": 0.001, "gap_min": -1e-9, "violations": 0}) == []
    misses = planner.find_misses({"gap_worst": 0.02, "gap_min": -0.1, "violations": 1})
    assert [each.split()[0] for each in misses] == ["gap_worst", "violations", "gap_min"]


def test_benchmark_when_quick_then_plans_are_valid_and_above_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner.main(["--quick", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["violations"] == 0
    assert figures["gap_min"] >= planner.LEAST_GAP
    assert figures["exact_gap_min"] >= planner.LEAST_GAP
    assert figures["instances"] == len(list(instances.list_quick_instances()))
    assert figures["exact_instances"] == 5
    assert figures["planning_seconds_small"] > 0
    assert "tiny interleaved P2 s0" in capsys.readouterr().out
