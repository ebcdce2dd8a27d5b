"""Steps to plan, recorded on the meta device, with budgets and links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from benchmarks._planner_models import (
    SHAPES,
    build,
    cut_layers,
    make_inputs,
    recompute_layers,
    run,
)
from benchmarks.pipelines.composing import compose_pipeline
from swapkit.api.recording import record
from swapkit.ir.machines import Machine
from swapkit.ir.traces import BEFORE, Kind, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.pipelines.timetables import ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One microbatch of a part of a model. `length`: its tokens, if fewer than `tokens`.

    `recompute`: whether `torch.utils.checkpoint` is around every layer.
    """

    shape: str
    layers: int
    tokens: int
    length: int = 0
    batch: int = 1
    is_first: bool = True
    is_last: bool = True
    hardware: str = "H100"
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step of one stage. `lengths`: tokens of each microbatch; empty: those of the part."""

    name: str
    part: Part
    schedule: ScheduleName = "accumulation"
    stages: int = 1
    stage: int = 0
    microbatches: int = 1
    chunks: int = 1
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A step and its machine. `share`: share of the activations' peak that fits the budget."""

    workload: Workload
    link_gb_per_s: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.workload.name} {self.link_gb_per_s} GB/s {self.share:.0%}"

    def machine(self, trace: Trace) -> Machine:
        fixed, peak = measure_memory(trace)
        speed = self.link_gb_per_s * 1e9
        return Machine(
            budget_bytes=fixed + int(self.share * (peak - fixed)),
            out_bytes_per_second=speed,
            in_bytes_per_second=speed,
            out_latency_seconds=10e-6,
            in_latency_seconds=10e-6,
            name=self.name,
        )


@cache
def record_part(part: Part) -> Trace:
    """Record a microbatch; gradients exist before it, as frameworks keep them between steps."""
    shape = cut_layers(SHAPES[part.shape], part.layers)
    model = build(shape, tokens=part.tokens, is_first=part.is_first, is_last=part.is_last)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    if part.recompute:
        recompute_layers(model)
    length = part.length or part.tokens
    inputs = make_inputs(model, shape.width, batch=part.batch, tokens=length)
    return record(lambda: run(model, inputs), model, hardware=part.hardware)


def compose(workload: Workload) -> Trace:
    """Return the whole step of a workload."""
    part = workload.part
    recorded: Trace | list[Trace]
    if workload.lengths:
        recorded = [record_part(replace(part, length=length)) for length in workload.lengths]
    else:
        recorded = record_part(part)
        if workload.microbatches == 1 and workload.stages == 1:
            return recorded
    return compose_pipeline(
        [recorded] * workload.chunks,
        schedule=workload.schedule,
        stages=workload.stages,
        stage=workload.stage,
        microbatches=workload.microbatches,
    )


def measure_memory(trace: Trace) -> tuple[int, int]:
    """Return the bytes allocated before the step, and the peak of the step without a plan."""
    changes = [0] * (len(trace.operators) + 1)
    for storage in trace.storages:
        changes[max(storage.birth, 0)] += storage.nbytes
        changes[storage.death] -= storage.nbytes
    sums = accumulate(changes)
    workspaces = (operator.workspace_bytes for operator in trace.operators)
    peak = max(there + workspace for there, workspace in zip(sums, workspaces, strict=False))
    fixed = sum(
        each.nbytes
        for each in trace.storages
        if each.birth == BEFORE and each.kind is not Kind.INPUT
    )
    return trace.base_bytes + fixed, trace.base_bytes + peak


def list_instances() -> Iterator[Instance]:
    """Yield all instances, grouped by workload."""
    yield from _singles()
    yield from _pipelines()
    yield from _irregular()


def list_quick_instances() -> Iterator[Instance]:
    """Yield a few small instances of every kind."""
    tiny = Part(shape="tiny", layers=4, tokens=1024)
    inner = Part(shape="tiny", layers=2, tokens=1024, is_first=False, is_last=False)
    experts = Part(shape="tiny-moe", layers=3, tokens=1024)
    yield from _of(Workload(name="tiny", part=tiny), {50: (0.7, 0.5)})
    yield from _of(
        Workload(name="tiny 1F1B P4 s1", part=inner, schedule="1f1b", stages=4, stage=1,
                 microbatches=8), {20: (0.5,)},
    )  # fmt: skip
    yield from _of(
        Workload(name="tiny interleaved P2 s0", part=inner, schedule="interleaved", stages=2,
                 microbatches=4, chunks=2), {20: (0.5,)},
    )  # fmt: skip
    yield from _of(Workload(name="tiny MoE", part=experts), {50: (0.7,)})
    yield from _of(
        Workload(name="tiny lengths", part=tiny, microbatches=2, lengths=(1024, 512)), {50: (0.7,)}
    )


def _of(workload: Workload, shares: dict[int, tuple[float, ...]]) -> Iterator[Instance]:
    for link, several in shares.items():
        for share in several:
            yield Instance(workload=workload, link_gb_per_s=link, share=share)


def _singles() -> Iterator[Instance]:
    yield from _of(
        Workload(name="7B 4k b2", part=Part(shape="7b", layers=32, tokens=4096, batch=2)),
        {50: (0.8, 0.6, 0.4, 0.3, 0.2, 0.12), 20: (0.6, 0.3)},
    )
    yield from _of(
        Workload(name="7B GQA 32k", part=Part(shape="7b-gqa", layers=32, tokens=32768)),
        {50: (0.6, 0.4, 0.2, 0.12), 20: (0.6, 0.3, 0.15)},
    )
    yield from _of(
        Workload(name="7B GQA 128k", part=Part(shape="7b-gqa", layers=32, tokens=131072)),
        {50: (0.4, 0.12), 20: (0.4, 0.15)},
    )
    yield from _of(
        Workload(
            name="13B 8k A100",
            part=Part(shape="13b", layers=40, tokens=8192, hardware="A100"),
        ),
        {20: (0.6, 0.4, 0.3, 0.2, 0.12), 50: (0.3,)},
    )
    yield from _of(
        Workload(name="70B 8k 8 layers", part=Part(shape="70b", layers=8, tokens=8192)),
        {50: (0.5, 0.3), 20: (0.4,)},
    )


def _pipelines() -> Iterator[Instance]:
    inner = Part(shape="70b", layers=4, tokens=8192, is_first=False, is_last=False)
    first = Part(shape="70b", layers=4, tokens=8192, is_last=False)
    older = Part(shape="70b", layers=4, tokens=8192, is_first=False, is_last=False, hardware="A100")
    wide = Part(shape="70b", layers=7, tokens=8192, is_last=False)
    half = Part(shape="70b", layers=2, tokens=8192, is_first=False, is_last=False)
    yield from _of(
        Workload(name="70B 1F1B P4 s0", part=first, schedule="1f1b", stages=4, microbatches=8),
        {50: (0.6, 0.4, 0.25, 0.15, 0.1), 20: (0.4, 0.15)},
    )
    yield from _of(
        Workload(name="70B 1F1B P4 s0 A100", part=older, schedule="1f1b", stages=4, microbatches=8),
        {20: (0.6, 0.4, 0.25, 0.15, 0.1)},
    )
    yield from _of(
        Workload(name="70B 1F1B P4 s2", part=inner, schedule="1f1b", stages=4, stage=2,
                 microbatches=8), {50: (0.5, 0.25), 20: (0.3,)},
    )  # fmt: skip
    yield from _of(
        Workload(name="70B 1F1B P8 s0", part=wide, schedule="1f1b", stages=8, microbatches=16),
        {50: (0.4, 0.2, 0.1, 0.07), 20: (0.2,)},
    )
    yield from _of(
        Workload(name="70B interleaved P4 V2 s0", part=half, schedule="interleaved", stages=4,
                 microbatches=8, chunks=2), {50: (0.6, 0.3, 0.15, 0.1), 20: (0.3,)},
    )  # fmt: skip
    yield from _of(
        Workload(name="70B interleaved P4 V2 s3", part=half, schedule="interleaved", stages=4,
                 stage=3, microbatches=8, chunks=2), {50: (0.4, 0.2), 20: (0.3,)},
    )  # fmt: skip


def _irregular() -> Iterator[Instance]:
    experts = Part(shape="moe", layers=8, tokens=8192)
    inner = Part(shape="moe", layers=2, tokens=8192, is_first=False, is_last=False)
    mixed = Part(shape="7b-gqa", layers=16, tokens=16384)
    stage = Part(shape="7b-gqa", layers=4, tokens=16384, is_first=False, is_last=False)
    yield from _of(Workload(name="MoE 8k", part=experts), {50: (0.6, 0.4, 0.25), 20: (0.5,)})
    yield from _of(
        Workload(name="MoE 1F1B P4 s0", part=inner, schedule="1f1b", stages=4, microbatches=8),
        {50: (0.5, 0.25, 0.15), 20: (0.3,)},
    )
    yield from _of(
        Workload(name="7B lengths 16k..3k", part=mixed, microbatches=4,
                 lengths=(16384, 3072, 9216, 6144)), {50: (0.6, 0.3, 0.2), 20: (0.4,)},
    )  # fmt: skip
    yield from _of(
        Workload(name="7B lengths 1F1B P4 s0", part=stage, schedule="1f1b", stages=4,
                 microbatches=8, lengths=(16384, 3072, 9216, 6144, 12288, 16384, 4096, 8192)),
        {50: (0.6, 0.3, 0.15), 20: (0.3,)},
    )  # fmt: skip


def list_timed(*, quick: bool) -> dict[str, Instance]:
    """Return the instances to time: about 500 slots and 256 items, and 2,500 and 1,280."""
    if quick:
        tiny = Part(shape="tiny", layers=4, tokens=1024)
        workload = Workload(name="tiny", part=tiny)
        return {"small": Instance(workload=workload, link_gb_per_s=50, share=0.6)}
    small = Workload(name="7B 4k", part=Part(shape="7b", layers=21, tokens=4096))
    part = Part(shape="70b", layers=8, tokens=8192, is_last=False)
    large = Workload(name="70B 1F1B P8 s0", part=part, schedule="1f1b", stages=8, microbatches=13)
    return {
        "small": Instance(workload=small, link_gb_per_s=50, share=0.3),
        "large": Instance(workload=large, link_gb_per_s=50, share=0.2),
    }
