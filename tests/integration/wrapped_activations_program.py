r"""Ranks whose activations are DTensors; run by `test_wrapped_activations.py`.

    python -m torch.distributed.run --nproc-per-node=2 \
        tests/integration/wrapped_activations_program.py tp dtensors sequence experts

The arguments are the programs to train. Each rank notes, for each program, which bytes autograd
saves and how many of them move, and whether sessions train to the same bits within their budgets.
Rank 0 prints it as one line of JSON.
"""

from __future__ import annotations

import functools
import sys
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit.ir.traces import Kind
from swapkit.testing import planning_at_once
from tests.integration import expert_parallel_program as experts
from tests.support.ranks import publish_and_exit
from tests.support.sessions import Plain, Training, digest, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swapkit.ir.traces import Trace

WIDTH, HIDDEN, TOKENS = 64, 256, 1024
LAYERS = 4
STEPS = 10
ATTEMPTS = 3
LEAST = 1024  # bytes of what moves


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.down(self.act(self.up(self.norm(x))).sigmoid())
        return x + mixed


def shard_in_local_tensors(model: nn.Sequential, mesh: Any) -> None:
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_in_dtensors(model: nn.Sequential, mesh: Any) -> None:
    for block in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(
                input_layouts=Shard(0), output_layouts=Shard(1), use_local_output=False
            ),
            "down": RowwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(0), use_local_output=False
            ),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "0": PrepareModuleInput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Shard(0),),
                use_local_output=False,
            ),
            str(len(model) - 1): PrepareModuleOutput(
                output_layouts=Shard(0), desired_output_layouts=Replicate()
            ),
        },
    )


def shard_sequence(model: nn.Sequential, mesh: Any) -> None:
    for block in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    last = str(len(model) - 1)
    parallelize_module(
        model,
        mesh,
        {
            "0": PrepareModuleInput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Shard(0),),
                use_local_output=True,
            ),
            last: PrepareModuleOutput(
                output_layouts=(Shard(0),),
                desired_output_layouts=(Replicate(),),
            ),
        },
    )


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(found, "elem", found)


class Sharded(Training):
    """Training whose parameters may be DTensors."""

    def forward(self) -> torch.Tensor:
        """Return the loss of a batch."""
        out = self.model(torch.randn(TOKENS, WIDTH))
        loss: torch.Tensor = out.square().mean()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    def step(self) -> None:
        """Train one step."""
        torch.manual_seed(self.steps_done)
        loss = self.forward()
        loss.backward()
        self.results.append(float(loss.detach()).hex())
        del loss
        grads = [each.grad for each in self.model.parameters() if each.grad is not None]
        self.results.append(digest(map(local, grads)))
        del grads
        assert self.optimizer is not None
        self.optimizer.step()
        self.model.zero_grad()
        self.steps_done += 1

    def outcome(self) -> list[str]:
        state = digest(map(local, self.model.state_dict().values()))
        return [*self.results, state, digest([torch.get_rng_state()])]


def make(shard: Callable[[nn.Sequential, Any], None]) -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(*[Mlp() for _ in range(LAYERS)])
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def make_fully_sharded() -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(*[Mlp() for _ in range(LAYERS)])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    shard_sequence(model, mesh["tensor"])
    for block in model:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return Sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


PROGRAMS: dict[str, tuple[Callable[[], Training], tuple[float, ...]]] = {
    "tp": (functools.partial(make, shard_in_local_tensors), (0.85, 0.6)),
    "dtensors": (functools.partial(make, shard_in_dtensors), (0.85, 0.6)),
    "sequence": (functools.partial(make, shard_sequence), (0.85, 0.6)),
    "experts": (functools.partial(experts.make, experts.exchange_functional), (0.85,)),
    "fully sharded": (make_fully_sharded, (0.85, 0.6)),
}


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)


def states_of(training: Training) -> list[torch.Tensor]:
    assert training.optimizer is not None
    states = training.optimizer.state.values()
    return [value for state in states for value in state.values() if torch.is_tensor(value)]


def record(training: Training) -> list[Any]:
    """Return the events of a step that is recorded without a session."""
    training.step()
    return events_of(swapkit.record(training.step, training.model, training.optimizer))


def events_of(trace: Trace) -> list[Any]:
    sizes = [storage.nbytes for storage in trace.storages]
    return [
        (event.kind.value, None if event.storage is None else sizes[event.storage])
        for event in trace.events
    ]


def find_unlike(some: list[Any], others: list[Any]) -> list[Any]:
    """Return the pairs of events that differ."""
    pairs = zip_longest(some, others)
    return [(one, other) for one, other in pairs if one != other]


# ---- what is saved, and what moves ---------------------------------------------------------------


def saved_bytes(training: Training) -> int:
    """Return the bytes of the distinct storages that one step saves, but parameters."""
    weights = {id(each) for each in training.model.parameters()}
    addresses = {local(each).untyped_storage().data_ptr() for each in training.model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        storage = local(tensor).untyped_storage()
        is_weight = id(base) in weights or isinstance(base, nn.Parameter)
        if not is_weight and storage.data_ptr() not in addresses and storage.nbytes() >= LEAST:
            found[storage.data_ptr()] = storage  # kept: no other gets its address
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = training.forward()
    total = sum(storage.nbytes() for storage in found.values())
    found.clear()
    loss.backward()
    training.model.zero_grad()
    return total


def moved_bytes(training: Training) -> int:
    """Return the bytes that leave the device in one step with everything swapped."""
    runtime = get_runtime()
    swapper = runtime.default_swapper(runtime.cpu)
    before = swapper.counters().copied_out_bytes
    torch.manual_seed(0)
    with swapkit.offload(min_bytes=0):
        loss = training.forward()
    loss.backward()
    training.model.zero_grad()
    return swapper.counters().copied_out_bytes - before


def run(
    make_it: Callable[[], Training], share: float, plain: Plain, events: list[Any]
) -> dict[str, Any]:
    """Train in a session; return what became of it."""
    training = make_it()
    limit = plain.budget(share)
    session = swapkit.budget(limit, training.model, training.optimizer)
    planned = 0
    with planning_at_once(), session:
        swapkit.reset_peak_memory_stats()
        for _ in range(STEPS):
            planned += session.stage in {"search", "stable"}  # routing may need another plan
            training.step()
            dist.barrier()
        trace = session.trace
        assert trace is not None
        peak = swapkit.memory_stats()["reserved_bytes.all.peak"]
        return {
            "same": training.outcome() == plain.outcome,
            "held": peak <= limit,
            "planned": planned,
            "unlike": find_unlike(events_of(trace), events),
            "states": {
                kind.value: sum(each.nbytes for each in trace.storages if each.kind is kind)
                for kind in (Kind.STATE, Kind.OPTIMIZER_STATE)
            },
            "expected": {
                Kind.STATE.value: count_bytes(training.model.parameters()),
                Kind.OPTIMIZER_STATE.value: count_bytes(states_of(training)),
            },
        }


def run_all(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        make_it, shares = PROGRAMS[name]
        training = make_it()
        found[f"{name}: saved"] = saved_bytes(training)
        # On a loaded machine, backward may need a tensor before its copy has begun: then it stays.
        found[f"{name}: moved"] = max(moved_bytes(training) for _ in range(ATTEMPTS))
        del training
        plain = train_plainly(make_it, STEPS)
        events = record(make_it())
        for share in shares:
            found[f"{name}: {share}"] = run(make_it, share, plain, events)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    experts._groups.append(dist.new_group(backend="gloo"))
    swapkit.install()
    publish_and_exit(run_all(sys.argv[1:]))


if __name__ == "__main__":
    main()
