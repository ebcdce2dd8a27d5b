"""The benchmark of fragmentation: its figures, and the document's configurations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import fragmentation
from benchmarks._planner_models import SHAPES, build, cut_layers
from benchmarks.replay.__main__ import main
from benchmarks.replay.comparing import measure_demand
from benchmarks.replay.steps import EXAMPLE, Configuration, list_configurations
from swapkit.ir.traces import Kind

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.mark.promise("E6")
def test_configurations_when_listed_then_all_rows_of_the_document() -> None:
    listed = list(list_configurations())
    rows = {(each.model, each.tokens, each.batch, each.stages) for each in listed}
    assert rows == {
        ("7b", 4096, 4, 1), ("7b", 6144, 4, 1),
        ("13b", 8192, 4, 1), ("13b", 4096, 2, 1), ("13b", 6144, 2, 1), ("13b", 8192, 2, 1),
        ("70b", 4096, 2, 4), ("70b", 6144, 2, 4), ("70b", 8192, 2, 4),
    }  # fmt: skip
    assert len({each.key for each in listed}) == len(listed) == 2 * len(rows)
    assert all(each.microbatches * each.batch == 16 for each in listed if each.stages == 1)


@pytest.mark.promise("E6")
def test_configuration_of_the_document_when_replayed_then_planned_addresses_save_memory() -> None:
    configuration = Configuration(
        model="7b", layers=32, tokens=4096, batch=4, microbatches=4, recompute=True
    )
    figures = fragmentation.measure(configuration)
    of = {name: figures[f"{configuration.key}_{name}_reserved_gib"] for name in fragmentation.KEYS}
    saved = figures[f"{configuration.key}_saved_gib"]
    assert saved == of["torch_native"] - of["planned"] > 0.31  # of the document's 0.31 to 2.19 GB
    assert of["planned"] < min(of["torch_expandable"], of["pool"])
    assert of["planned"] < 1.01 * figures[f"{configuration.key}_live_gib"]
    assert figures[f"{configuration.key}_planned_hit_share"] == 1


def test_shapes_when_shared_by_devices_then_an_eighth_of_each_matrix() -> None:
    whole, part = (
        build(cut_layers(SHAPES[name], 1), tokens=16).layers[0] for name in ("7b", "7b tp8")
    )
    sizes = [
        sum(each.numel() for each in layer.parameters() if each.dim() == 2)
        for layer in (whole, part)
    ]
    assert sizes[0] == 8 * sizes[1]


def test_example_when_recorded_then_gradients_are_there_and_lengths_differ() -> None:
    small = type(EXAMPLE)(
        width=128, layers=1, vocabulary=64, lengths=EXAMPLE.lengths[:4], in_flight=2
    )
    trace = small.trace()
    labels = [block.label for block in trace.blocks[: trace.present]]
    assert labels.count(Kind.GRADIENT.value) == labels.count(Kind.STATE.value) > 0
    assert len(set(EXAMPLE.lengths)) > 20
    assert measure_demand(trace).max_live_bytes > 0


def test_benchmark_when_quick_then_prints_its_tables_and_writes_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    main(["--quick", "--json", str(file)])
    said = capsys.readouterr().out
    assert "TINY 1k, 4" in said
    assert "varying lengths, within" in said
    figures = json.loads(file.read_text(encoding="utf-8"))
    keys = [key.removesuffix("_live_gib") for key in figures if key.endswith("_live_gib")]
    assert len(keys) == figures["configurations"] == 2
    for key in keys:
        for name in fragmentation.KEYS:
            reserved, least = (
                figures[f"{key}_{name}_{amount}_gib"] for amount in ("reserved", "least")
            )
            assert figures[f"{key}_live_gib"] <= least <= reserved
    saved = [figures[f"{key}_saved_gib"] for key in keys]
    assert (min(saved), max(saved)) == (figures["saved_gib_least"], figures["saved_gib_most"])
    fits = [figures[f"example_{name}_fits"] for name in fragmentation.KEYS]
    assert fits == [False, False, False, True]
    assert figures["example_planned_unused_gib"] == 0
    assert figures["example_torch_native_unused_gib"] > 0
