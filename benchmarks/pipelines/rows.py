"""The rows: the seeds' pipelines, long pipelines, and fewer tensor-parallel ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks._planner_instances import Part, measure_memory, record_part
from benchmarks._planner_models import SHAPES
from benchmarks.pipelines.choice import choose_ways
from benchmarks.pipelines.claim_stages import HARDWARE, LATENCY_SECONDS, Stage, record_chunk
from benchmarks.pipelines.composing import PipelineRecordings
from benchmarks.pipelines.joint import plan_pipeline
from benchmarks.pipelines.microbatches import read_chunks
from benchmarks.pipelines.periodic import estimate_curves
from benchmarks.pipelines.schedules import order_of
from benchmarks.pipelines.timetables import Pipeline, order_pipeline
from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Kind
from swapkit.planning.planner import make_plan

if TYPE_CHECKING:
    from benchmarks.pipelines.joint import PipelinePlan
    from benchmarks.pipelines.orders import JobOrder
    from swapkit.ir.traces import Trace

Figures = dict[str, Any]


def make_machine(link_bytes_per_s: float, budget_bytes: int = 1) -> Machine:
    return Machine(
        budget_bytes=budget_bytes,
        out_bytes_per_second=link_bytes_per_s,
        in_bytes_per_second=link_bytes_per_s,
        out_latency_seconds=LATENCY_SECONDS,
        in_latency_seconds=LATENCY_SECONDS,
    )


# ---- the seeds' pipelines ------------------------------------------------------------------------


def record_pipeline(stage: Stage, *, recompute: bool) -> PipelineRecordings:
    """Return the recordings of all stages: the embedding in the first, the loss in the last."""
    order = order_pipeline(
        Pipeline(
            schedule=stage.schedule,
            stages=stage.stages,
            microbatches=stage.microbatches,
            chunks=stage.chunks,
        )
    )
    last = stage.stages * stage.chunks - 1
    traces: dict[tuple[bool, bool], Trace] = {}
    stages = []
    for places in order.places:
        chunks = []
        for place in places:
            ends = place == 0, place == last
            if ends not in traces:
                traces[ends] = record_chunk(
                    stage, is_first=ends[0], is_last=ends[1], recompute=recompute
                )
            chunks.append(traces[ends])
        stages.append(read_chunks(chunks, stage.microbatches))
    return PipelineRecordings(order, stages)


def measure_seed(stage: Stage, *, spare: float, link_bytes_per_s: float) -> Figures:
    """Return the gains over full recompute, with the memory that this leaves free per device."""
    begin = time.perf_counter()
    plain, full = (record_pipeline(stage, recompute=each) for each in (False, True))
    steps = [full.compose(number, own) for number, own in enumerate(full.find_bubbles())]
    full_seconds = max(each.seconds for each in steps)
    budget_bytes = int(max(measure_memory(each)[1] for each in steps) / (1 - spare))
    machines = [make_machine(link_bytes_per_s, budget_bytes)] * stage.stages
    plans = plan_pipeline(plain, machines)
    joint, separate = plans.joint, plans.separate
    return {
        "budget_bytes": budget_bytes,
        "most": full_seconds / plans.free_seconds - 1,
        "separate_gain": full_seconds / separate.seconds - 1,
        "joint_gain": full_seconds / joint.seconds - 1,
        "separate_bytes": sum(_peaks(separate)),
        "joint_bytes": sum(_peaks(joint)),
        "early_seconds": sum(each.early_seconds for each in joint.stages),
        "settled": joint.is_settled and separate.is_settled,
        "planning_seconds": time.perf_counter() - begin,
    }


def _peaks(plan: PipelinePlan) -> list[int]:
    return [stage.peak_bytes for stage in plan.stages]


# ---- long pipelines ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A pipeline; `name`: of torch's schedule."""

    name: str
    ranks: int
    microbatches: int
    layers: int = 4  # of each chunk
    tokens: int = 8192
    shape: str = "70b"
    communication_seconds: float = 0.0027  # a microbatch's activations at 50 GB/s


def record_scale(scale: Scale, order: JobOrder) -> PipelineRecordings:
    """Return the recordings of all ranks; inner chunks share one trace."""
    last = max(place for own in order.places for place in own)
    chunks = {}
    for ends in ((True, False), (False, False), (False, True)):
        part = Part(
            shape=scale.shape, layers=scale.layers, tokens=scale.tokens, is_first=ends[0],
            is_last=ends[1], hardware=HARDWARE,
        )  # fmt: skip
        chunks[ends] = read_chunks([record_part(part)], scale.microbatches)[0]
    return PipelineRecordings(
        order, [[chunks[place == 0, place == last] for place in own] for own in order.places]
    )


def measure_scale(scale: Scale, *, share: float, link_bytes_per_s: float) -> Figures:
    """Return time and memory of joint and of separate plans for one budget per device.

    Args:
        scale: the pipeline.
        share: of the memory above the least that a stage needs, which the budget is.
        link_bytes_per_s: speed of the link, per direction.
    """
    order = order_of(
        scale.name,
        ranks=scale.ranks,
        microbatches=scale.microbatches,
        communication_seconds=scale.communication_seconds,
    )
    begin = time.perf_counter()
    recordings = record_scale(scale, order)
    curves = estimate_curves(recordings, make_machine(link_bytes_per_s))
    peaks = [[way.peak_bytes for way in curve.ways] for curve in curves]
    least, most = max(map(min, peaks)), max(own[0] for own in peaks)
    budget_bytes = least + int(share * (most - least))
    choice = choose_ways(recordings.timing, curves, [budget_bytes] * scale.ranks)
    assert choice is not None
    seconds = [each for rank in range(scale.ranks) for each in recordings.seconds_of(rank)]
    free_seconds = max(recordings.timing.run(seconds))
    chosen, alone = (
        [own.ways[way].peak_bytes for own, way in zip(curves, ways, strict=True)]
        for ways in (choice.ways, choice.separate)
    )
    return {
        "jobs": len(seconds),
        "budget_bytes": budget_bytes,
        "free_bytes": sum(own[0] for own in peaks),
        "free_seconds": free_seconds,
        "separate_slower": choice.separate_seconds / free_seconds - 1,
        "joint_slower": choice.seconds / free_seconds - 1,
        "separate_bytes": sum(alone),
        "joint_bytes": sum(chosen),
        "complete": choice.is_complete,
        "planning_seconds": time.perf_counter() - begin,
    }


# ---- fewer tensor-parallel ranks -----------------------------------------------------------------


def measure_fewer_ranks(
    *, memory_bytes: int, link_bytes_per_s: float, network_bytes_per_s: float
) -> Figures:
    """Return the gain in throughput of eight devices: tp1, dp8 and plans over tp8.

    Both train batches of eight samples, of 8,192 tokens, of LLaMA2-7B. Tensor parallelism sums the
    activations of each layer over its ranks twice in forward and twice in backward; data
    parallelism sums the gradients once in a step. Sums are rings, and do not overlap with other
    work. Optimizer states are an eighth on each device in both cases, and not counted.

    Args:
        memory_bytes: of a device, for all but optimizer states.
        link_bytes_per_s: between device and host, per direction.
        network_bytes_per_s: of each device, for sums.
    """
    samples = ranks = 8
    tokens = 8192
    part = Part(shape="7b", layers=32, tokens=tokens, hardware=HARDWARE)
    split = record_part(replace(part, shape="7b tp8"))
    whole = record_part(part)

    def sum_seconds(nbytes: int) -> float:
        return 2 * (ranks - 1) / ranks * nbytes / network_bytes_per_s

    sums = sum_seconds(4 * part.layers * tokens * SHAPES["7b"].width * 2)  # bf16
    gradients = [each for each in whole.storages if each.kind is Kind.GRADIENT]
    dp8_sums = sum_seconds(sum(each.nbytes for each in gradients))
    tp8_seconds = samples * (split.seconds + sums)
    figures: Figures = {
        "tp8_seconds": tp8_seconds,
        "tp8_sums_seconds": samples * sums,
        "tp8_peak_bytes": split.peak_bytes,
        "tp1_peak_bytes": whole.peak_bytes,
        "budget_bytes": memory_bytes,
        "dp8_sums_seconds": dp8_sums,
        "most": tp8_seconds / (whole.seconds + dp8_sums) - 1,
        "gain": None,
    }
    try:
        plan = make_plan(whole, make_machine(link_bytes_per_s, memory_bytes))
    except InfeasibleBudget as error:
        return {**figures, "least_bytes": error.least_bytes}
    assert plan.prediction is not None
    tp1_seconds = plan.prediction.seconds + dp8_sums
    return {**figures, "tp1_seconds": tp1_seconds, "gain": tp8_seconds / tp1_seconds - 1}
