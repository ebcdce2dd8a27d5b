"""FSDP2 on two ranks, whose sessions choose `reshard_after_forward`; run by `test_resharding.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/resharding_program.py

Rank 0 prints, as one line of JSON, what became of each scenario, for each rank.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from dataclasses import replace as with_other
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import swapkit
from swapkit._runtime.torch_compat.internals import count_collectives, fsdp_groups_of
from swapkit.planning.beside import at_once
from swapkit.testing import slow_link
from tests.support.ranks import publish_and_exit
from tests.support.shards import digest_shards

LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a model is sharded and trained.

    `share`: of the plain peak, that is the budget. `silent`: the rank whose user keeps the setting.
    `evaluates`: after each step, and once between backward and the optimizer's step.
    """

    reshards: bool = True
    share: float = 1.5
    width: int = 512
    tokens: int = 64
    steps: int = 14
    microbatches: int = 1
    silent: int = -1
    evaluates: bool = False
    is_beside: bool = False  # plans are made beside the training
    speed: float = 0.0  # of copies, in bytes per second; then only activations are large
    fails: bool = False  # the block ends with an error
    steps_another: bool = False  # rank 0 steps another optimizer between forward and backward


SCENARIOS = {
    "kept": Scenario(steps_another=True),
    "beside": Scenario(is_beside=True, microbatches=2),
    "evaluated": Scenario(evaluates=True, tokens=8),  # evaluations are most of a step, and gathers
    # Copies of one layer's bytes take many times what a gather takes, also on a busy machine.
    "tight": Scenario(share=0.9, tokens=768, speed=1e7, steps=8),
    "freed": Scenario(reshards=False, share=0.82, tokens=512, speed=5e7),
    "silent": Scenario(silent=1),
    "failed": Scenario(fails=True),
}


class Stopped(Exception):
    """Ends a block."""


class Training:
    """A model of layers that are sharded each, with its optimizer."""

    def __init__(self, scenario: Scenario) -> None:
        torch.manual_seed(0)
        self.scenario = scenario
        width = scenario.width
        self.model = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(LAYERS)
            ]
        )
        for layer in self.model:
            fully_shard(layer, reshard_after_forward=scenario.reshards)
        fully_shard(self.model)
        kind = torch.optim.SGD if scenario.speed else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=1e-3)
        self.another = torch.optim.SGD(nn.Linear(2, 2).parameters())
        self.steps_done = 0
        self.results: list[str] = []
        self.collectives: list[int] = []  # begun in each step

    def step(self) -> None:
        before = count()
        torch.manual_seed(1000 * dist.get_rank() + self.steps_done)
        for _ in range(self.scenario.microbatches):
            loss = self.run()
            if self.scenario.steps_another and dist.get_rank() == 0:
                self.another.step()
            loss.backward()
            self.results.append(float(loss.detach()).hex())
        if self.scenario.evaluates:
            self.evaluate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.collectives.append(count() - before)
        if self.scenario.evaluates:
            self.evaluate()
        self.steps_done += 1

    def run(self) -> torch.Tensor:
        x = torch.randn(self.scenario.tokens, self.scenario.width)
        loss: torch.Tensor = self.model(x).square().mean()
        return loss

    def evaluate(self) -> None:
        with torch.no_grad():
            self.results.append(float(self.run()).hex())
        assert all(isinstance(each, DTensor) for each in self.model[0].parameters())
        if self.steps_done % 2:  # a forward with gradients, whose backward never comes
            self.results.append(float(self.run().detach()).hex())

    def outcome(self) -> list[str]:
        return [*self.results, *digest_shards(self.model, self.optimizer)]

    def frees(self) -> list[bool]:
        """Return FSDP2's setting of each layer."""
        return [
            group.post_forward_mesh_info is not None
            for layer in self.model
            if isinstance(layer, FSDPModule)
            for group in fsdp_groups_of(layer._get_fsdp_state())
        ]


def count() -> int:
    return count_collectives(dist.group.WORLD, torch.device("cpu"))


def train_plainly(scenario: Scenario) -> tuple[Training, int]:
    """Return a finished training without a session, and the most bytes in use in a step."""
    gc.collect()
    plain = Training(scenario)
    for _ in range(2):
        plain.step()
    swapkit.reset_peak_memory_stats()
    plain.step()
    peak = swapkit.memory_stats()["allocated_bytes.all.peak"]
    while plain.steps_done < scenario.steps:
        plain.step()
    return plain, peak


def train(training: Training) -> None:
    steps = training.scenario.steps
    for _ in range(steps):
        training.step()
        if training.scenario.fails and training.steps_done == steps - 1:
            raise Stopped


def run(scenario: Scenario) -> dict[str, Any]:
    plain, peak = train_plainly(scenario)
    expected, collectives = plain.outcome(), plain.collectives
    del plain
    gc.collect()
    training = Training(scenario)
    limit = int(scenario.share * peak)
    found: dict[str, Any] = {"limit": limit, "plain collectives": collectives}
    with TemporaryDirectory() as folder, slow_link(bytes_per_s=scenario.speed):
        plan = Path(folder) / "plan"
        try:
            with open_session(training, limit) as session:
                try:
                    with at_once(value=not scenario.is_beside):
                        train(training)
                finally:
                    found |= look(training, session)
                    if session.plan is not None:
                        session.save_plan(plan)
        except Stopped:
            training.step()
        found |= {"restored": training.frees(), "same": training.outcome() == expected}
        if scenario == SCENARIOS["kept"]:
            found["given"] = [follow(plan, limit, reshards=reshards) for reshards in (True, False)]
    return found


def open_session(training: Training, limit: int) -> Any:
    scenario = training.scenario
    return swapkit.budget(
        limit,
        training.model,
        training.optimizer,
        policy="swap" if scenario.speed else "auto",
        search_steps=1,
        reshard="user" if scenario.silent == dist.get_rank() else "auto",
    )


def look(training: Training, session: Any) -> dict[str, Any]:
    return {
        "frees": training.frees(),
        "collectives": training.collectives[:],
        "held": session.stats.peak_bytes,
        "explained": " ".join(session.explain().split()),
    }


def follow(plan: Path, limit: int, *, reshards: bool) -> str:
    """Return what a session says that is given a plan, made where all modules kept weights."""
    gc.collect()
    training = Training(with_other(SCENARIOS["kept"], reshards=reshards))
    with swapkit.budget(limit, training.model, training.optimizer, plan=plan) as session:
        training.step()
        return " ".join(session.explain().split())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install()
    names = [each for each in sys.argv[1:] if each in SCENARIOS] or list(SCENARIOS)
    publish_and_exit({name: run(SCENARIOS[name]) for name in names})


if __name__ == "__main__":
    main()
