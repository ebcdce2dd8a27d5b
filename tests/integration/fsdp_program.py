"""Sharded models on two ranks: their traces, and training within a budget; run by `test_fsdp.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/fsdp_program.py

Rank 0 prints, as one line of JSON, what was found in each scenario, for each rank.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp import fully_shard as shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit._runtime.allocators.memory_holders import find_holders
from swapkit._runtime.recording.recorder import Recorder
from swapkit.api import recording
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import Kind
from swapkit.testing import planning_at_once
from tests.support.occupancy import assert_memory_is_the_pools
from tests.support.ranks import publish_and_exit
from tests.support.shards import digest_shards, local_of

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS = 10
ATTEMPTS = 4
TOLERANCE = 0.02  # of the peak


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a model is sharded and trained. `share`: of the plain peak, that is the budget."""

    width: int = 64
    layers: int = 4
    tokens: int = 512
    reshards: bool | int = True
    is_half: bool = False
    offloads: bool = False
    microbatches: int = 1
    is_parallel: bool = False  # by tensors: the ranks have the same data
    is_compiled: bool = False  # layer by layer
    share: float = 0.0  # no session


SCENARIOS = {
    "resharded": Scenario(),
    "kept": Scenario(reshards=False),
    "by number": Scenario(reshards=2),
    "half": Scenario(is_half=True),
    "offloaded": Scenario(offloads=True),
    "accumulated": Scenario(microbatches=3),
    "tensor parallel": Scenario(is_parallel=True),
    "compiled": Scenario(width=128, tokens=4096, share=0.7, is_compiled=True),
    "large": Scenario(width=512, layers=6, tokens=1024, share=0.9),
    "large, less": Scenario(width=512, layers=6, tokens=1024, share=0.85),
}


class Layer(nn.Sequential):
    """A layer with a forward of the program's own: Dynamo compiles none of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


class Training:
    """A model of layers that are sharded each, with its optimizer."""

    def __init__(self, scenario: Scenario) -> None:
        torch.manual_seed(0)
        self.scenario = scenario
        self.model = nn.Sequential(
            *[
                Layer(
                    nn.Linear(scenario.width, 2 * scenario.width),
                    nn.GELU(),
                    nn.Linear(2 * scenario.width, scenario.width),
                )
                for _ in range(scenario.layers)
            ]
        )
        if scenario.is_compiled:
            for layer in self.model:
                layer.compile(backend="aot_eager")
        if scenario.is_parallel:
            self._split()
        else:
            self._shard()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps_done = 0
        self.results: list[str] = []

    def _shard(self) -> None:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {
            "reshard_after_forward": self.scenario.reshards,
            "mp_policy": half if self.scenario.is_half else MixedPrecisionPolicy(),
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=False) if self.scenario.offloads else OffloadPolicy()
            ),
        }
        for layer in self.model:
            shard(layer, **options)
        shard(self.model, **options)

    def _split(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            assert isinstance(layer, nn.Module)
            first = ColwiseParallel(use_local_output=False)
            parallelize_module(layer, mesh, {"0": first, "2": RowwiseParallel()})

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1

    def backward(self) -> None:
        rank = 0 if self.scenario.is_parallel else dist.get_rank()
        torch.manual_seed(1000 * rank + self.steps_done)
        last = self.scenario.microbatches - 1
        for number in range(last + 1):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(number == last)
            x = torch.randn(self.scenario.tokens, self.scenario.width)
            loss = self.model(x).float().square().mean()
            loss.backward()
            self.results.append(float(loss.detach()).hex())
            del x, loss

    def outcome(self) -> list[str]:
        return [*self.results, *digest_shards(self.model, self.optimizer)]


def peak_of(training: Training) -> int:
    """Return the most bytes in use in one step."""
    swapkit.reset_peak_memory_stats()
    training.step()
    return swapkit.memory_stats()["allocated_bytes.all.peak"]


def record(training: Training) -> dict[str, Any]:
    """Return what a recorded step has, and what there really is.

    Between two operators, a thread of gloo may still hold a buffer that is no longer needed. Then
    another step is recorded, on all ranks.
    """
    for _ in range(ATTEMPTS):
        found = record_once(training)
        is_unlike = abs(found["traced"] - found["real"]) > TOLERANCE * found["real"]
        unlike = torch.tensor(int(is_unlike))
        dist.all_reduce(unlike)
        if not unlike:
            break
    return found


def record_once(training: Training) -> dict[str, Any]:
    recorders: list[Recorder] = []

    class Kept(Recorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            recorders.append(self)

    swapkit.reset_peak_memory_stats()
    with mock.patch.object(recording, "Recorder", Kept):
        trace = swapkit.record(training.step, training.model, training.optimizer)
    real = swapkit.memory_stats()["allocated_bytes.all.peak"]
    check_trace(trace)
    problem = ""
    try:
        assert_memory_is_the_pools(recorders[0], trace)
    except AssertionError as error:
        problem = str(error)
    return {
        "problem": problem,
        "traced": trace.peak_bytes,
        "real": real,
        "shards": count_bytes(training.model.parameters()),
        "kinds": {
            kind.value: sum(each.nbytes for each in trace.storages if each.kind is kind)
            for kind in Kind
        },
    }


def fail(scenario: Scenario) -> dict[str, Any]:
    """Return the text of an out-of-memory error after backward, and what there is to name."""
    gc.collect()
    training = Training(scenario)
    training.step()
    with swapkit.budget("64MiB", training.model, training.optimizer, policy="rescue"):
        training.backward()
        try:
            torch.empty(1 << 28)
        except torch.OutOfMemoryError as error:
            text = str(error)
    installation = require_installation()
    held = {
        holder.name: holder.nbytes
        for holder in find_holders(installation.device, installation.tracker)
    }
    gradients = [each.grad for each in training.model.parameters() if each.grad is not None]
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    return {
        "text": text,
        "held": held,
        "real": {
            "parameters": count_bytes(training.model.parameters()),
            "gradients of parameters": count_bytes(gradients),
            "optimizer states": count_bytes(states),
        },
    }


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_of(each).nbytes for each in tensors)


def run(scenario: Scenario) -> dict[str, Any]:
    """Train without and within a budget; return what became of it."""
    gc.collect()  # former scenarios' memory
    plain = Training(scenario)
    for _ in range(2):
        plain.step()
    peak = peak_of(plain)
    found = record(plain)
    if not scenario.share:
        return found
    while plain.steps_done < STEPS:
        plain.step()
    expected = plain.outcome()
    del plain
    training = Training(scenario)
    limit = int(scenario.share * peak)
    rescues = []
    with swapkit.budget(limit, training.model, training.optimizer, search_steps=2) as session:
        with planning_at_once():
            for _ in range(STEPS):
                training.step()
                rescues.append((session.stage, session.stats.oom_rescues))
        found |= {
            "limit": limit,
            "held": session.stats.peak_bytes,
            "stages": [stage for stage, _ in rescues],
            "rescues": [count for _, count in rescues],
            "is_planned": session.plan is not None,
            "explained": session.explain(),
            "same": training.outcome() == expected,
        }
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install()
    found = {
        name: fail(SCENARIOS["resharded"]) if name == "failed" else run(SCENARIOS[name])
        for name in sys.argv[1:] or (*SCENARIOS, "failed")
    }
    publish_and_exit(found)


if __name__ == "__main__":
    main()
