"""The seed documents' models and pipelines, recorded on the meta device, composed and planned.

A stage is recorded twice: unchanged, and with `torch.utils.checkpoint` around every layer. The
budget is the peak of the second recording, plus the share that is free there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks._planner_instances import measure_memory
from benchmarks._planner_models import SHAPES, Shape, build, make_inputs, recompute_layers, run
from benchmarks.pipelines.composing import compose_pipeline
from swapkit.api.recording import record
from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.planning.planner import make_plan

if TYPE_CHECKING:
    from benchmarks.pipelines.timetables import ScheduleName
    from swapkit.ir.traces import Trace

HARDWARE = "Ascend 910B"
LATENCY_SECONDS = 10e-6
# S3's models are parts of GPT-175B; ours have the same width, heads and parameters per layer.
GPT = Shape(layers=8, width=12288, heads=96, key_heads=96, hidden=32768, vocabulary=50304)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The first stage of a pipeline, or a whole model; `layers`: layers per chunk."""

    shape: Shape
    layers: int
    tokens: int
    batch: int
    schedule: ScheduleName = "accumulation"
    stages: int = 1
    microbatches: int = 1
    chunks: int = 1


S0 = Stage(shape=SHAPES["7b"], layers=32, tokens=4096, batch=1)
S2 = Stage(shape=SHAPES["13b"], layers=40, tokens=16384, batch=1)
S3 = Stage(shape=GPT, layers=8, tokens=8192, batch=10, microbatches=4)
S3_PIPELINE = Stage(
    shape=GPT, layers=2, tokens=8192, batch=3, schedule="1f1b", stages=4, microbatches=3
)
S3_INTERLEAVED = Stage(
    shape=GPT, layers=1, tokens=8192, batch=2, schedule="interleaved", stages=4, microbatches=4,
    chunks=2,
)  # fmt: skip


def record_chunk(stage: Stage, *, is_first: bool, is_last: bool, recompute: bool) -> Trace:
    """Return the step of a microbatch of one chunk; gradients exist before it."""
    shape = replace(stage.shape, layers=stage.layers)
    model = build(shape, tokens=stage.tokens, is_first=is_first, is_last=is_last)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    if recompute:
        recompute_layers(model)
    inputs = make_inputs(model, shape.width, batch=stage.batch, tokens=stage.tokens)
    return record(lambda: run(model, inputs), model, hardware=HARDWARE)


def compose(stage: Stage, *, recompute: bool) -> Trace:
    """Return the trace of a stage's step; gradients exist before it."""
    is_whole = stage.stages == 1
    recorded = record_chunk(stage, is_first=is_whole, is_last=is_whole, recompute=recompute)
    return compose_pipeline(
        [recorded] * stage.chunks,
        schedule=stage.schedule,
        stages=stage.stages,
        stage=0,
        microbatches=stage.microbatches,
    )


def simulate_claim(
    stage: Stage, *, policy: str, spare: float, link_bytes_per_s: float
) -> dict[str, float | None]:
    """Return the gains over full recompute; `gain` None: no plan fits.

    Args:
        stage: the stage of the seed document.
        policy: policy of the planner.
        spare: share of the memory that is free under full recompute.
        link_bytes_per_s: speed of the link, per direction.
    """
    plain, full = compose(stage, recompute=False), compose(stage, recompute=True)
    budget_bytes = int(measure_memory(full)[1] / (1 - spare))
    machine = Machine(
        budget_bytes=budget_bytes,
        out_bytes_per_second=link_bytes_per_s,
        in_bytes_per_second=link_bytes_per_s,
        out_latency_seconds=LATENCY_SECONDS,
        in_latency_seconds=LATENCY_SECONDS,
    )
    figures: dict[str, float | None] = {
        "budget_bytes": budget_bytes,
        "peak_bytes": measure_memory(plain)[1],
        "full_seconds": full.seconds,
        "most": full.seconds / plain.seconds - 1,
        "gain": None,
    }
    try:
        plan = make_plan(plain, machine, policy)
    except InfeasibleBudget:
        return figures
    assert plan.prediction is not None
    return {**figures, "gain": full.seconds / plan.prediction.seconds - 1}
