"""The parallel schemes of `parallel.py`: small trainings on every rank of a gloo process group.

Each program is made anew for each way to train it, from the same seed, so that the ways can be
compared bit by bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks._parallel_parts import (
    LAYERS,
    LEARNING_RATE,
    ROWS,
    SEQUENCE,
    WIDTH,
    Program,
    Stack,
    make_batch,
    make_training,
)
from benchmarks._parallel_pipelines import (
    dual_pipe_v,
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    no_model,
    one_f_one_b,
    uneven,
    zbv,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# ---- data parallel -------------------------------------------------------------------------------


def ddp() -> Program:
    """DDP with `no_sync` for all microbatches but the last."""
    model = Stack()
    wrapped = DistributedDataParallel(model)

    def before(is_last: bool) -> AbstractContextManager[None]:  # noqa: FBT001 - of one call
        return nullcontext() if is_last else wrapped.no_sync()

    return make_training(wrapped, model, microbatches=2, before=before)


def zero1() -> Program:
    """DDP with an optimizer whose states are sharded."""
    model = Stack()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE
    )
    return make_training(wrapped, model, optimizer=optimizer)


def _shard(model: Stack, mesh: DeviceMesh | None = None, **options: Any) -> Stack:
    if mesh is not None:
        options["mesh"] = mesh
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp() -> Program:
    """FSDP2, weights gathered again for backward."""
    return make_training(_shard(Stack()))


def fsdp_keep() -> Program:
    """FSDP2, weights kept from forward to backward."""
    return make_training(_shard(Stack(), reshard_after_forward=False))


def fsdp_part() -> Program:
    """FSDP2, weights sharded among pairs of ranks between forward and backward."""
    return make_training(_shard(Stack(), reshard_after_forward=2))


def fsdp_bf16() -> Program:
    """FSDP2 that computes in bfloat16 and reduces in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return make_training(_shard(Stack(), mp_policy=policy))


def fsdp_cpu() -> Program:
    """FSDP2 with parameters, gradients and states on the CPU."""
    return make_training(_shard(Stack(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def fsdp_accumulation() -> Program:
    """FSDP2, gradients reduced after the last of three microbatches."""
    model = _shard(Stack())

    def before(is_last: bool) -> AbstractContextManager[None]:  # noqa: FBT001 - of one call
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    return make_training(model, microbatches=3, before=before)


def fsdp_large() -> Program:
    """FSDP2 with more bytes of parameters than of activations."""
    model = _shard(Stack(LAYERS, 512, 2))
    return make_training(model, x=make_batch(2, 512))


def hsdp() -> Program:
    """FSDP2 within pairs of ranks, replicated between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return make_training(_shard(Stack(), mesh))


# ---- tensor parallel -----------------------------------------------------------------------------


def _tensor_parallel(model: Stack, mesh: DeviceMesh, *, is_local: bool = True) -> Stack:
    for layer in model.layers:
        styles = {
            "up": ColwiseParallel(use_local_output=is_local),
            "down": RowwiseParallel(use_local_output=is_local),
        }
        if not is_local:
            styles["norm"] = SequenceParallel(use_local_output=False)
            styles["up"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
            styles["down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        parallelize_module(layer, mesh, styles)
    return model


def tp() -> Program:
    """Column- and row-parallel layers, plain tensors between them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return make_training(_tensor_parallel(Stack(), mesh), x=make_batch(is_shared=True))


def tp_dtensor() -> Program:
    """Column- and row-parallel layers, DTensors between them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Stack()
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(),
            },
        )
    return make_training(model, x=make_batch(is_shared=True))


def sp() -> Program:
    """Sequence parallel: norms and residuals on a part of the sequence, as DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _tensor_parallel(Stack(), mesh, is_local=False)
    whole = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
    )
    parallelize_module(model, mesh, whole)
    return make_training(model, x=make_batch(is_shared=True))


def fsdp_tp() -> Program:
    """FSDP2 over pairs of ranks, tensor parallel within them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(Stack(), mesh["tp"])
    generator = torch.Generator().manual_seed(17 + mesh.get_local_rank("dp"))
    x = torch.randn(ROWS, SEQUENCE, WIDTH, generator=generator)
    return make_training(_shard(model, mesh["dp"]), x=x)


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Experts(nn.Module):
    """A router, and experts of which each rank has some; tokens travel by all-to-all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.expert = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        out = torch.bincount(chosen, minlength=ranks)
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out)
        sent, received = out.tolist(), into.tolist()
        there = collectives.all_to_all_single_autograd(flat[order], received, sent, _everyone())
        back = collectives.all_to_all_single_autograd(
            self.expert(there), sent, received, _everyone()
        )
        mixed = torch.zeros_like(flat).index_copy(0, order, back)
        made: torch.Tensor = x + (mixed * weights[:, None]).view_as(x)
        return made


def experts() -> Program:
    """Expert parallel, by functional collectives."""
    return make_training(nn.Sequential(*(Experts() for _ in range(3))))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A program of the table."""

    make: Callable[[], Program]
    label: str
    ranks: int = 2
    is_first_limited: bool = False  # and the other ranks have all the memory that they take


ROWS_BY_NAME = {
    "ddp": Row(make=ddp, label="DDP, no_sync"),
    "zero1": Row(make=zero1, label="ZeRO-1 over DDP"),
    "fsdp": Row(make=fsdp, label="FSDP2 reshard"),
    "fsdp_keep": Row(make=fsdp_keep, label="FSDP2 reshard False"),
    "fsdp_part": Row(make=fsdp_part, label="FSDP2 reshard 2", ranks=4),
    "fsdp_bf16": Row(make=fsdp_bf16, label="FSDP2 bf16"),
    "fsdp_cpu": Row(make=fsdp_cpu, label="FSDP2 CPUOffloadPolicy"),
    "fsdp_accumulation": Row(make=fsdp_accumulation, label="FSDP2 accumulation"),
    "fsdp_large": Row(make=fsdp_large, label="FSDP2 large parameters"),
    "hsdp": Row(make=hsdp, label="HSDP 2x2", ranks=4),
    "tp": Row(make=tp, label="TP"),
    "tp_dtensor": Row(make=tp_dtensor, label="TP, DTensors between"),
    "sp": Row(make=sp, label="SP"),
    "fsdp_tp": Row(make=fsdp_tp, label="FSDP2 x TP 2x2", ranks=4),
    "experts": Row(make=experts, label="expert parallel"),
    "gpipe": Row(make=gpipe, label="GPipe"),
    "1f1b": Row(make=one_f_one_b, label="1F1B"),
    "1f1b_first": Row(
        make=one_f_one_b, label="1F1B, budget of rank 0", ranks=4, is_first_limited=True
    ),
    "1f1b_uneven": Row(make=uneven, label="1F1B, stages of 2 and 6"),
    "no_model": Row(make=no_model, label="1F1B, model=None"),
    "looped_bfs": Row(make=looped_bfs, label="LoopedBFS"),
    "interleaved": Row(make=interleaved, label="Interleaved1F1B"),
    "interleaved_zb": Row(make=interleaved_zb, label="InterleavedZeroBubble"),
    "zbv": Row(make=zbv, label="ZBVZeroBubble"),
    "dual_pipe_v": Row(make=dual_pipe_v, label="DualPipeV"),
}


def make_program(name: str) -> Program:
    """Make a program of the table from its seed."""
    torch.manual_seed(0)
    return ROWS_BY_NAME[name].make()
