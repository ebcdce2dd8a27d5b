"""Pipelines of `parallel.py`: the schedules of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks._parallel_parts import LAYERS, MICROBATCHES, Program, Stack, make_adam, make_batch

if TYPE_CHECKING:
    from collections.abc import Sequence


def _pipeline(
    schedule: type[Any],
    *,
    chunks: int = 1,
    layers: Sequence[int] | None = None,
    is_v: bool = False,
    has_model: bool = True,
) -> Program:
    """Return a training by one of torch's schedules.

    Args:
        schedule: its class.
        chunks: stages of each rank.
        layers: blocks of each rank's stages; None: `LAYERS` divided by the stages.
        is_v: whether the second stages are in reverse order.
        has_model: whether the session is given the stages' modules.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = chunks * ranks
    numbers = [rank + ranks * chunk for chunk in range(chunks)]
    if is_v:
        numbers = [rank, count - 1 - rank]
    own = max(1, 2 * LAYERS // count) if layers is None else layers[rank]
    modules: list[nn.Module] = [Stack(own) for _ in numbers]
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out - target).square().mean()

    is_multi = issubclass(schedule, schedules.PipelineScheduleMulti)
    runner = schedule(stages if is_multi else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss)
    x = make_batch(2 * MICROBATCHES, is_shared=True)
    target = torch.zeros_like(x)
    is_last = count - 1 in numbers

    def forward_backward() -> float:
        arguments = (x,) if 0 in numbers else ()
        losses: list[torch.Tensor] = []
        if is_last:
            runner.step(*arguments, target=target, losses=losses)
        else:
            runner.step(*arguments)
        return float(sum(each.detach().item() for each in losses))

    given: nn.Module | list[nn.Module] = modules[0] if len(modules) == 1 else modules
    return Program(
        model=given if has_model else None,
        optimizers=[make_adam(*modules)],
        forward_backward=forward_backward,
        modules=modules,
    )


def gpipe() -> Program:
    """All forwards, then all backwards."""
    return _pipeline(schedules.ScheduleGPipe)


def one_f_one_b() -> Program:
    """1F1B."""
    return _pipeline(schedules.Schedule1F1B)


def uneven() -> Program:
    """1F1B with stages of 2 and 6 blocks."""
    return _pipeline(schedules.Schedule1F1B, layers=(2, 6))


def no_model() -> Program:
    """1F1B in a session without a model."""
    return _pipeline(schedules.Schedule1F1B, has_model=False)


def looped_bfs() -> Program:
    """Two stages a rank, breadth first."""
    return _pipeline(schedules.ScheduleLoopedBFS, chunks=2)


def interleaved() -> Program:
    """Two stages a rank, 1F1B."""
    return _pipeline(schedules.ScheduleInterleaved1F1B, chunks=2)


def interleaved_zb() -> Program:
    """Two stages a rank, gradients of weights after those of inputs."""
    return _pipeline(schedules.ScheduleInterleavedZeroBubble, chunks=2)


def zbv() -> Program:
    """ZBV: two stages a rank, in the shape of a V, with split backward."""
    return _pipeline(schedules.ScheduleZBVZeroBubble, chunks=2, is_v=True)


def dual_pipe_v() -> Program:
    """DualPipeV."""
    return _pipeline(schedules.ScheduleDualPipeV, chunks=2, is_v=True)
