"""Two ranks of a tensor-parallel model with recomputed regions; run by `test_tensor_parallel.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/tensor_parallel_program.py

Rank 0 prints, as one line of JSON, what each setting cost: collectives that ran in backward beyond
those of plain training, and bytes held between forward and backward.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute.regions import run_region
from swapkit.registry import Collectives, Recompute

SIDE = 256
ROWS = 2048  # 2 MiB

WORDS = ("all_reduce", "all_gather", "reduce_scatter")

ops = torch.ops._c10d_functional


def waited(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = ops.wait_tensor(tensor)
    return result


def group_name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


class Copied(torch.autograd.Function):
    """The same on every rank; gradients are summed."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> Any:
        return waited(ops.all_reduce(grad, "sum", group_name()))


class Summed(torch.autograd.Function):
    """The sum over ranks; gradients are the same."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return waited(ops.all_reduce(value.contiguous(), "sum", group_name()))

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> Any:
        return grad


class Gathered(torch.autograd.Function):
    """A weight of which each rank has some rows, whole."""

    @staticmethod
    def forward(_ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        return waited(ops.all_gather_into_tensor(shard, dist.get_world_size(), group_name()))

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> Any:
        ranks = dist.get_world_size()
        return waited(ops.reduce_scatter_tensor(grad.contiguous(), "sum", ranks, group_name()))


class Mlp(nn.Module):
    """A column-parallel linear layer, and a row-parallel one."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(SIDE, SIDE // ranks) / SIDE)
        self.down = nn.Parameter(torch.randn(SIDE // ranks, SIDE) / SIDE)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = (Copied.apply(value) @ self.up).tanh()
        summed: torch.Tensor = Summed.apply(hidden @ self.down)
        return summed.tanh()


class Mixer(nn.Module):
    """A linear layer whose weight is sharded, and so is what it makes of it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(SIDE // ranks, SIDE) / SIDE)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = value @ Gathered.apply(self.shard)
        return mixed.exp()


class Block(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.mlp = Mlp(ranks)
        self.mixer = Mixer(ranks)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mixer(self.mlp(value))
        return out.sin()


class Model(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(ranks) for _ in range(2))

    def forward(self, value: torch.Tensor, terms: Recompute | None = None) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value) if terms is None else run_region(terms, layer, (value,), {})
        return value


class Counted(TorchDispatchMode):
    """Counts what starts a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in {"DTensor", "AsyncCollectiveTensor"} for kind in types):
            return NotImplemented  # what they come to is counted
        name = str(func)
        if "wait_tensor" not in name:
            for word in WORDS:
                self.counts[word] += word in name.replace("allgather", "all_gather")
        return func(*args, **kwargs or {})


def held_bytes() -> int:
    """Return the bytes in use once gloo's threads have let go of what they sent.

    A collective is over for its caller before the thread that ran it drops its tensors. A barrier
    may be run by another of those threads, so it proves nothing: all must sleep.
    """
    asleep = 0
    while asleep < 3:
        time.sleep(0.001)  # without the GIL, which such a thread may wait for
        asleep = 0 if any_other_runs() else asleep + 1
    return int(swapkit.memory_stats()["allocated_bytes.all.current"])


def any_other_runs() -> bool:
    """Return whether another thread of this process runs, or waits for a processor."""
    own = str(threading.get_native_id())
    states = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if thread.name != own:
                states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return any(state in "RD" for state in states)


def train(model: Model, terms: Recompute | None, start: torch.Tensor) -> tuple[Any, Any, int]:
    """Return gradients, collectives in backward, and bytes held between the passes."""
    leaf = start.clone().requires_grad_()
    before_bytes = held_bytes()
    loss = model(leaf * 0.5, terms).sum()
    held = held_bytes() - before_bytes
    with Counted() as counted:
        grads = torch.autograd.grad(loss, [leaf, *model.parameters()])
    return grads, counted.counts, held


SETTINGS = {
    "all again": Collectives(),
    "activations kept": Collectives(repeat=False),
    "weights kept": Collectives(repeat_weights=False),
    "all kept": Collectives(repeat=False, repeat_weights=False),
    "kept in one mlp": Collectives(keep_in=("layers.1.mlp",)),
    "kept but in one mlp": Collectives(repeat=False, repeat_in=("layers.0.mlp",)),
    "kept in one layer": Collectives(keep_in=("layers.0",), repeat_in=("layers.0.mlp",)),
}

# The keys of a configuration, on and off.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "full": {"recompute": True},
    "full, weights gathered again": {"recompute": True, "parallel_optimizer_comm_recompute": True},
    "full, activations kept": {"recompute": True, "mp_comm_recompute": False},
    "full, kept in one mlp": {
        "recompute": True,
        "select_comm_recompute_exclude": {r"mlp\.matmul": [1]},
    },
    "mlps": {"select_recompute": ["mlp"]},
    "mlps, kept": {"select_recompute": ["mlp"], "mp_comm_recompute": False},
    "mlps, kept but in one": {
        "select_recompute": ["mlp"],
        "mp_comm_recompute": False,
        "select_comm_recompute": {r"mlp\.matmul": [1]},
    },
    "sliced": {"recompute": True, "recompute_slice_activation": True},
}


def measure() -> dict[str, Any]:
    ranks = dist.get_world_size()
    model = Model(ranks)
    get_runtime().tracker.add_model(model)
    torch.manual_seed(1)  # from here on the same on all ranks
    start = torch.rand(ROWS, SIDE)
    expected, plain, plain_held = train(model, None, start)
    found: dict[str, Any] = {"plain": {"held": plain_held, **plain}}
    terms = {name: Recompute(collectives=each) for name, each in SETTINGS.items()}
    terms["sliced"] = Recompute(slice_group=dist.group.WORLD)
    terms["sliced, checked, kept"] = Recompute(
        slice_group=dist.group.WORLD,
        check_values=True,
        save=("mm",),
        collectives=Collectives(repeat=False),
    )
    for name, each in terms.items():
        grads, counts, held = train(model, each, start)
        assert all(map(torch.equal, grads, expected)), name
        found[name] = {"held": held, **{word: counts[word] - plain[word] for word in WORDS}}
    for name, section in DOCUMENTS.items():
        configuration = swapkit.configure(
            model, {"recompute_config": section}, tensor_parallel_group=dist.group.WORLD
        )
        grads, counts, held = train(model, None, start)
        configuration.remove()
        assert all(map(torch.equal, grads, expected)), name
        extra = {word: counts[word] - plain[word] for word in WORDS}
        found[f"configured: {name}"] = {"held": held, **extra}
    return found


def measure_dtensor() -> dict[str, Any]:
    """Return collectives in the backward of regions of a model of DTensors."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mlp = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE), nn.Tanh())
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    start = torch.rand(64, SIDE)

    def run(terms: Recompute | None) -> tuple[Any, Counter[str]]:
        value = start.clone().requires_grad_()
        out = mlp(value) if terms is None else run_region(terms, mlp, (value,), {})
        with Counted() as counted:
            grads = torch.autograd.grad(out.sum(), [value, *mlp.parameters()])
        whole = [getattr(grad, "_local_tensor", grad) for grad in map(waited_for, grads)]
        return whole, counted.counts

    expected, plain = run(None)
    found = {}
    for name, terms in {
        "again": Recompute(check_values=True),
        "kept": Recompute(collectives=Collectives(repeat=False), check_values=True),
        "kept, products saved": Recompute(collectives=Collectives(repeat=False), save=("matmul",)),
    }.items():
        grads, counts = run(terms)
        assert all(map(torch.equal, grads, expected)), name
        found[name] = sum(counts.values()) - sum(plain.values())
    return found


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    return waited(tensor) if hasattr(tensor, "trigger_wait") else tensor


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install()
    torch.manual_seed(dist.get_rank())
    found = {"functional": measure(), "dtensor": measure_dtensor()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert all(each == found for each in everywhere), everywhere
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.barrier()
    sys.stdout.flush()
    # Once DTensor was used, torch's own exit may abort over a thread of gloo that was not joined.
    os._exit(0)


if __name__ == "__main__":
    main()
