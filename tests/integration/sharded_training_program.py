"""Four ranks that share a model; run by `test_sharded_training.py`.

    torchrun --nproc-per-node=4 tests/integration/sharded_training_program.py F

`F` is a folder for checkpoints. Rank 0 prints, as one line of JSON, what each rank found, by the
way in which the model or its optimizer's states are distributed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import swapkit
from swapkit._runtime.allocators.installation import installed_pool
from swapkit._runtime.optimizer.state_slots import find_slots, local_part
from swapkit.testing import planning_at_once
from tests.support.ranks import publish_and_exit
from tests.support.sessions import WIDTH as BLOCK_WIDTH
from tests.support.sessions import Block, digest, in_use_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.traces import Trace

checkpoint: Any = torch.distributed.checkpoint
WIDTH = 256
LAYERS = 4
STEPS = 3
SESSION_STEPS = 6
MICROBATCHES = 4
TOKENS = 128


class Training(NamedTuple):
    """A model, as it is called, and its optimizer."""

    model: nn.Module
    called: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer with the states."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(8, WIDTH, generator=generator)
        self.called(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> list[torch.Tensor]:
        slots = [slot for state in self.inner.state.values() for slot in find_slots(state)]
        return [slot.tensor for slot in slots]

    def on_device_bytes(self) -> int:
        pool = installed_pool("cpu")
        return sum(each.nbytes for each in self.states() if pool.owns(each.data_ptr()))

    def bits(self) -> list[torch.Tensor]:
        parameters = [local_part(each.detach()) for each in self.model.parameters()]
        return [each.clone() for each in [*parameters, *self.states()]]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def make_adam(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def ddp() -> Training:
    model = make_model()
    return Training(model, nn.parallel.DistributedDataParallel(model), make_adam(model))


def zero() -> Training:
    model = make_model()
    called = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return Training(model, called, optimizer)


def shard(mesh: DeviceMesh, **options: Any) -> Training:
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(model, model, make_adam(model, **options))


def tensor_parallel() -> Training:
    ways = [ColwiseParallel(), RowwiseParallel()]
    plan = {str(index): ways[index % 2] for index in range(LAYERS)}
    model = parallelize_module(make_model(), init_device_mesh("cpu", (4,)), plan)
    return Training(model, model, make_adam(model))


def compare(make: Callable[[], Training]) -> dict[str, Any]:
    """Train plainly and with offloaded states; return what is the same, and the states' bytes."""
    plain, ours = make(), make()
    swapkit.offload(ours.optimizer)
    most_bytes = 0
    for number in range(STEPS):
        for each in (plain, ours):
            each.step(number)
        most_bytes = max(most_bytes, ours.on_device_bytes())
    same = all(map(torch.equal, ours.bits(), plain.bits()))
    return {"same": same, "bytes": most_bytes, "plain": plain.on_device_bytes()}


def flatten(value: Any) -> list[Any]:
    """Return the leaves of a state dict, with the shards of DTensors."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in [key, *flatten(value[key])]]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in flatten(each)]
    return [local_part(value) if isinstance(value, torch.Tensor) else value]


def are_alike(one: Any, other: Any) -> bool:
    pairs = list(zip(flatten(one), flatten(other), strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def whole(training: Training) -> list[torch.Tensor]:
    """Return the whole parameters and states, from all ranks."""
    states = [state[key] for state in training.inner.state.values() for key in sorted(state)]
    tensors: list[Any] = [*training.model.parameters(), *states]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]


def state_dicts(training: Training) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def checkpoints(folder: Path) -> dict[str, Any]:
    """Save on two ranks, load on four, and train on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "pair"))
    half, pair = mesh.get_local_rank("half"), mesh["pair"]
    plain, ours = shard(pair), shard(pair)
    swapkit.offload(ours.optimizer)
    for number in range(STEPS):
        for each in (plain, ours):
            each.step(number)
    dicts = [get_optimizer_state_dict(each.model, each.optimizer) for each in (plain, ours)]
    found = {"dicts": are_alike(*dicts)}
    del dicts
    saved = state_dicts(ours)
    place = str(folder / str(half))
    checkpoint.save(saved, checkpoint_id=place, process_group=pair.get_group())
    del saved
    dist.barrier()
    everyone = init_device_mesh("cpu", (4,))
    loaded = [shard(everyone), shard(everyone)]
    swapkit.offload(loaded[1].optimizer)
    for each in loaded:
        target = state_dicts(each)
        checkpoint.load(target, checkpoint_id=str(folder / "0"))
        set_state_dict(
            each.model,
            each.optimizer,
            model_state_dict=target["model"],
            optim_state_dict=target["optimizer"],
        )
        del target
    found["loaded"] = all(map(torch.equal, whole(loaded[1]), whole(ours)))
    for number in range(STEPS):
        for each in loaded:
            each.step(number)
    found["trained"] = all(map(torch.equal, loaded[0].bits(), loaded[1].bits()))
    return {**found, "bytes": loaded[1].on_device_bytes(), "plain": loaded[0].on_device_bytes()}


# ---- several parts -------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Parts of a model with an optimizer each, and a function that runs them forward and back."""

    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    run: Callable[[torch.Tensor], object]

    def train(self, steps: int, watch: Callable[[], object] = int) -> list[str]:
        """Return the bits of gradients and parameters of each step; call `watch` after each."""
        found = []
        parameters = [each for part in self.parts for each in part.parameters()]
        for step in range(steps):
            torch.manual_seed(step)
            self.run(torch.randn(MICROBATCHES * TOKENS, BLOCK_WIDTH))
            found.append(
                digest([local_part(each.grad) for each in parameters if each.grad is not None])
            )
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(digest([local_part(each.detach()) for each in parameters]))
            watch()
        return found


def make_parts(seed: int) -> list[nn.Module]:
    parts: list[nn.Module] = []
    for number in range(2):
        torch.manual_seed(seed + number)
        parts.append(nn.Sequential(Block()))
    return parts


def with_optimizers(parts: list[nn.Module], run: Callable[[torch.Tensor], object]) -> Parts:
    return Parts(parts, [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts], run)


def pipeline() -> Parts:
    """Two chunks on each rank, interleaved."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = make_parts(2 * rank)
    device = torch.device("cpu")
    stages: list[Any] = [
        PipelineStage(part, index * ranks + rank, 2 * ranks, device)
        for index, part in enumerate(parts)
    ]
    schedule = ScheduleInterleaved1F1B(
        stages, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean()
    )

    def run(batch: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(batch)
        elif rank == ranks - 1:
            schedule.step(target=torch.zeros_like(batch), losses=[])
        else:
            schedule.step()

    return with_optimizers(parts, run)


def sharded_parts() -> Parts:
    """Two parts that FSDP2 shards, one after the other."""
    parts = make_parts(0)
    for part in parts:
        for block in part.children():
            fully_shard(block)
        fully_shard(part)

    def run(batch: torch.Tensor) -> None:
        for piece in batch.chunk(MICROBATCHES):
            parts[1](parts[0](piece)).square().mean().backward()

    return with_optimizers(parts, run)


def plan_parts(make: Callable[[], Parts]) -> dict[str, Any]:
    """Train plainly, then in a session with offloaded states; return what became of that."""
    plain = make()
    swapkit.reset_peak_memory_stats()
    expected = plain.train(SESSION_STEPS)
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    between_bytes = in_use_bytes()
    del plain
    ours = make()
    swapkit.offload(ours.optimizers)
    limit = int(between_bytes + 0.85 * (peak_bytes - between_bytes))
    with swapkit.budget(limit, ours.parts, ours.optimizers, search_steps=1) as session:
        # Ranks do not wait until others propose to keep parameters, which ends the plans so far.
        planned: list[Trace] = []

        def watch() -> None:
            if session.plan is not None and session.trace is not None:
                planned.append(session.trace)

        with planning_at_once():
            same = ours.train(SESSION_STEPS, watch) == expected
        operators = planned[-1].operators if planned else ()
        return {
            "same": same,
            "steps": session.stats.steps,
            "planned": len(planned) > 0,
            "is_within": session.stats.peak_bytes <= limit,
            "parts": sorted({each.module.partition(".")[0] for each in operators if each.module}),
            "microbatches": sorted({each.microbatch for each in operators}),
            "explained": session.explain().count("on the host"),
        }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install(device="cpu")
    ranks = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {
        "ddp": compare(ddp),
        "zero": compare(zero),
        "fsdp": compare(lambda: shard(ranks)),
        "fsdp foreach": compare(lambda: shard(ranks, foreach=True)),
        "fsdp fused": compare(lambda: shard(ranks, fused=True)),
        "hsdp": compare(lambda: shard(square)),
        "tp": compare(tensor_parallel),
        "pipeline": plan_parts(pipeline),
        "sharded parts": plan_parts(sharded_parts),
        "checkpoints": checkpoints(Path(sys.argv[1])),
    }
    publish_and_exit(found)


if __name__ == "__main__":
    main()
